"""Real weather: monthly mean air temperature of the NCEP/NCAR Reanalysis 1 (NOAA PSL), split into one file a year.

The data comes out of a pinned source package, where its tutorial keeps it.
Kalnay et al., The NCEP/NCAR 40-Year Reanalysis Project, Bull. Amer. Meteor. Soc. 77, 437-470, 1996.
"""

import tempfile
from pathlib import Path

import netCDF4
import numpy as np

from course_lib.data import make, packages, stats

PACKAGE = "pyunicorn==1.0.0"
SHA256 = "4853ee7c48084a8795daeca1ae2d97ef1bd00da68cdb6262f7a5d4683d5b4d76"
MEMBER = "pyunicorn-1.0.0/docs/source/examples/tutorials/data/air.mon.mean.nc"
RECIPE = f"NCEP/NCAR Reanalysis 1, monthly mean air temperature at sigma 0.995, from {PACKAGE}"


def fetch(folder: Path) -> Path:
    """The one file, unpacked into the folder."""
    return packages.unpack(PACKAGE, SHA256, [MEMBER], folder, "--no-binary", "pyunicorn")[0]


def make_years(source: Path, out: Path, *, format: str) -> None:
    """Split the file into AIR_<YEAR>.nc, in degrees Celsius, latitude from north to south."""
    with netCDF4.Dataset(source) as file:
        dates = netCDF4.num2date(file["time"][:], file["time"].units)
        years = np.array([date.year for date in dates])
        for year in np.unique(years):
            fields = file["air"][years == year].filled(np.nan)
            path = out / f"AIR_{year}.nc"
            with make.year_file(
                path,
                units="degC",
                long_name="monthly mean air temperature",
                steps=len(fields),
                shape=fields.shape[1:],
                format=format,
                recipe=RECIPE,
            ) as (field, time):
                field[:] = fields
                time[:] = netCDF4.date2num(dates[years == year], time.units, time.calendar)
            stats.save(out, {path: stats.of_values(fields)})


def make_all(out: Path, *, format: str) -> None:
    """Make data/ncep unless it is there."""
    done = out / "stats.json"  # written with the last year too
    if len(stats.load(out)) >= 79 and len(list(out.glob("AIR_*.nc"))) >= 79:
        print(f"{out}: the real data is there")
        return
    with tempfile.TemporaryDirectory(dir=done.parent) as folder:
        make_years(fetch(Path(folder)), out, format=format)
    print(f"{out}: {len(list(out.glob('AIR_*.nc')))} years of real data")
