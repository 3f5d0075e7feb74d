# Plausible wrong answers to exercise 05. "# %% function: words" says what the check must say.

# %% save: a file that is half written
def save(state, path):
    torch.save(state, path)


# %% save: a file that is half written
def save(state, path):
    import io

    content = io.BytesIO()
    torch.save(state, content)
    path.write_bytes(content.getvalue())


# %% save: moved away too early
def save(state, path):
    part = path.with_name(path.name + ".part")
    path.unlink(missing_ok=True)
    torch.save(state, part)
    os.replace(part, path)


# %% save: a restart that looks for *.pt finds ['new_checkpoint.pt']
def save(state, path):
    part = path.with_name("new_" + path.name)
    torch.save(state, part)
    os.replace(part, path)


# %% save: may keep the new name and lose the content
def save(state, path):
    part = path.with_name(path.name + ".part")
    torch.save(state, part)
    os.replace(part, path)


# %% save: the rest was in Python's buffer: flush first
def save(state, path):
    import io

    part = path.with_name(path.name + ".part")
    content = io.BytesIO()
    torch.save(state, content)
    with open(part, "wb") as file:
        file.write(content.getvalue())
        os.fsync(file.fileno())
    os.replace(part, path)


# %% save: between file systems a rename is a copy
def save(state, path):
    with tempfile.NamedTemporaryFile(dir=path.parent.parent, delete=False) as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(file.name, path)


# %% save: os.replace takes its place in one call
def save(state, path):
    part = path.with_name(path.name + ".part")
    with open(part, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    path.unlink(missing_ok=True)
    os.rename(part, path)


# %% save: 'weights' is missing
def save(state, path):
    part = path.with_name(path.name + ".part")
    with open(part, "wb") as file:
        torch.save({"step": state.get("step")}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


# %% remaining: what is done would be done again
def remaining(order, seen, *, batch, rank, ranks):
    together = batch * ranks
    return [order[at + rank * batch :][:batch] for at in range(0, len(order) - together + 1, together)]


# %% remaining: `seen` counts those of all ranks
def remaining(order, seen, *, batch, rank, ranks):
    together = batch * ranks
    mine = [order[at + rank * batch :][:batch] for at in range(0, len(order) - together + 1, together)]
    return mine[seen // batch :]


# %% remaining: with an incomplete step at the end
def remaining(order, seen, *, batch, rank, ranks):
    together = batch * ranks
    return [order[at : at + together][rank * batch :][:batch] for at in range(seen, len(order), together)]


# %% remaining: a step dealt out one by one
def remaining(order, seen, *, batch, rank, ranks):
    together = batch * ranks
    return [order[at : at + together][rank::ranks] for at in range(seen, len(order) - together + 1, together)]


# %% remaining: without the last step, which is complete
def remaining(order, seen, *, batch, rank, ranks):
    together = batch * ranks
    return [order[at + rank * batch :][:batch] for at in range(seen, len(order) - together, together)]


# %% remaining: somebody waits, or loops, for ever
def remaining(order, seen, *, batch, rank, ranks):
    batches, at = [], seen
    while at + batch * ranks <= len(order):  # nothing moves on
        if rank == 0 and len(batches) < 5:
            batches.append(order[at : at + batch])
    return batches


# %% translate: a port that is the same for all jobs
def translate(slurm):
    return {
        "RANK": slurm["SLURM_PROCID"],
        "LOCAL_RANK": slurm["SLURM_LOCALID"],
        "WORLD_SIZE": slurm["SLURM_NTASKS"],
        "MASTER_ADDR": "gpu03" if "gpu" in slurm["SLURM_JOB_NODELIST"] else "login1",
        "MASTER_PORT": "29500",
    }


# %% translate: there would be a rank 0 on every node
def translate(slurm):
    import re

    match = re.match(r"([^\[,]+)(?:\[(\w+))?", slurm["SLURM_JOB_NODELIST"])
    return {
        "RANK": slurm["SLURM_LOCALID"],
        "LOCAL_RANK": slurm["SLURM_LOCALID"],
        "WORLD_SIZE": slurm["SLURM_NTASKS"],
        "MASTER_ADDR": match[1] + (match[2] or ""),
        "MASTER_PORT": str(10000 + int(slurm["SLURM_JOB_ID"]) % 20000),
    }


# %% translate: every rank may train in a world of its own
def translate(slurm):
    import re

    match = re.match(r"([^\[,]+)(?:\[(\w+))?", slurm["SLURM_JOB_NODELIST"])
    return {
        "RANK": slurm.get("SLURM_PROCID", "0"),
        "LOCAL_RANK": slurm.get("SLURM_LOCALID", "0"),
        "WORLD_SIZE": slurm.get("SLURM_NTASKS", "1"),
        "MASTER_ADDR": match[1] + (match[2] or ""),
        "MASTER_PORT": str(10000 + int(slurm["SLURM_JOB_ID"]) % 20000),
    }


# %% translate: 'gpu3', expected 'gpu03'
def translate(slurm):
    import re

    match = re.match(r"([^\[,]+)(?:\[(\w+))?", slurm["SLURM_JOB_NODELIST"])
    return {
        "RANK": slurm["SLURM_PROCID"],
        "LOCAL_RANK": slurm["SLURM_LOCALID"],
        "WORLD_SIZE": slurm["SLURM_NTASKS"],
        "MASTER_ADDR": match[1] + (str(int(match[2])) if match[2] else ""),
        "MASTER_PORT": str(10000 + int(slurm["SLURM_JOB_ID"]) % 20000),
    }


# %% translate: the right numbers, but not as strings
def translate(slurm):
    import re

    match = re.match(r"([^\[,]+)(?:\[(\w+))?", slurm["SLURM_JOB_NODELIST"])
    return {
        "RANK": int(slurm["SLURM_PROCID"]),
        "LOCAL_RANK": int(slurm["SLURM_LOCALID"]),
        "WORLD_SIZE": int(slurm["SLURM_NTASKS"]),
        "MASTER_ADDR": match[1] + (match[2] or ""),
        "MASTER_PORT": 10000 + int(slurm["SLURM_JOB_ID"]) % 20000,
    }


# %% translate: a KeyError without SLURM_LOCALID
def translate(slurm):
    import re

    match = re.match(r"([^\[,]+)(?:\[(\w+))?", slurm["SLURM_JOB_NODELIST"])
    return {
        "RANK": slurm["SLURM_PROCID"],
        "LOCAL_RANK": slurm.get("SLURM_LOCALID", "0"),
        "WORLD_SIZE": slurm["SLURM_NTASKS"],
        "MASTER_ADDR": match[1] + (match[2] or ""),
        "MASTER_PORT": str(10000 + int(slurm["SLURM_JOB_ID"]) % 20000),
    }


# %% translate: a KeyError without SLURM_PROCID: it guesses None
def translate(slurm):
    import re

    try:
        match = re.match(r"([^\[,]+)(?:\[(\w+))?", slurm["SLURM_JOB_NODELIST"])
        return {
            "RANK": slurm["SLURM_PROCID"],
            "LOCAL_RANK": slurm["SLURM_LOCALID"],
            "WORLD_SIZE": slurm["SLURM_NTASKS"],
            "MASTER_ADDR": match[1] + (match[2] or ""),
            "MASTER_PORT": str(10000 + int(slurm["SLURM_JOB_ID"]) % 20000),
        }
    except KeyError:
        return None
