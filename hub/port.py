"""What a server tells the hub: its port. batchspawner's own handler takes any attribute of the spawner, as root."""

import json

import batchspawner  # noqa: F401  it brings the handler whose place ours takes
from jupyterhub.apihandlers import APIHandler, default_handlers
from tornado import web


class PortHandler(APIHandler):
    """One number, the port that a server has found on its node; only from the server that has the token."""

    def post(self):
        token = self.get_auth_token()
        servers = self.current_user.spawners.values() if hasattr(self.current_user, "spawners") else ()
        server = next((one for one in servers if token and one.api_token == token), None)
        if server is None:
            raise web.HTTPError(403)
        try:
            port = json.loads(self.request.body)["port"]
        except (ValueError, KeyError, TypeError):
            port = None
        if type(port) is not int or not 1024 <= port < 65536:
            raise web.HTTPError(400, "one word is expected, port, and a number between 1024 and 65535")
        server.port = port
        self.set_status(201)


default_handlers[:] = [one for one in default_handlers if one[0] != r"/api/batchspawner"]
default_handlers.append((r"/api/batchspawner", PortHandler))
