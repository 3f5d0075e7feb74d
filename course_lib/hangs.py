"""What ranks that hang are doing: their Python stacks, seen from outside, and the collectives that each has begun."""

import json
import sys
from pathlib import Path

from course_lib import processes
from course_lib.cockpit import Table


def stack(pid: int, *, calls: int = 6) -> str:
    """Where a process's main thread is now, the innermost call first, by py-spy; the process notices nothing."""
    program = Path(sys.executable).with_name("py-spy")
    code, printed = processes.run([str(program), "dump", "--json", "--pid", str(pid)], timeout=30)
    if code != 0:
        return f"py-spy can't look into process {pid} ({processes.failure(code, printed, 30)}); may you ptrace it?"
    main = next(thread for thread in json.loads(printed) if thread["os_thread_id"] == pid)
    return "\n".join(f"    {call['name']} ({call['short_filename']}:{call['line']})" for call in main["frames"][:calls])


def save_flight_record(folder: str | Path, rank: int) -> None:
    """Write what torch's Flight Recorder has kept of this rank's collectives; it does if TORCH_FR_BUFFER_SIZE is set."""
    from torch._C._distributed_c10d import _dump_fr_trace_json  # private: NCCL writes it by itself, gloo does not

    Path(folder, f"flight.{rank}.json").write_bytes(_dump_fr_trace_json())


def read_flight_records(folder: str | Path) -> Table:
    """The collectives of all ranks side by side, by their number: where they part is where somebody is missing or astray."""
    rows: dict[int, dict[int, str]] = {}
    ranks = []
    for path in sorted(Path(folder).glob("flight.*.json"), key=lambda path: int(path.suffixes[-2][1:])):
        ranks.append(int(path.suffixes[-2][1:]))
        for entry in json.loads(path.read_text()).get("entries", []):  # none before the first collective
            name, sizes = entry["profiling_name"].partition(":")[2], entry["input_sizes"]
            shape = f" ({'×'.join(map(str, sizes[0]))})" if sizes else ""  # a barrier sends nothing
            rows.setdefault(entry["collective_seq_id"], {})[ranks[-1]] = name + shape
    titles = ("collective", *(f"rank {rank}" for rank in ranks))
    return Table(titles, [(number, *(row.get(rank, "–") for rank in ranks)) for number, row in sorted(rows.items())])
