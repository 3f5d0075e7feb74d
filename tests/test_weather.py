"""The simulated weather stays bounded, looks like weather, and is the same every time."""

import numpy as np
import pytest

from course_lib.data import weather

SIZE = 32


@pytest.fixture(scope="module")
def fields() -> dict[str, np.ndarray]:
    """480 hours of each variable: {name: (time, y, x)}."""
    hours = np.stack(list(weather.simulate(1980, hours=480, size=SIZE)))
    assert hours.dtype == np.float32 and hours.shape == (480, len(weather.VARIABLES), SIZE, SIZE)
    return dict(zip(weather.VARIABLES, hours.swapaxes(0, 1)))


def test_a_year_is_its_seed():
    def simulate(year: int, hours: int) -> list[bytes]:
        return [fields.tobytes() for fields in weather.simulate(year, hours=hours, size=16)]

    assert simulate(1980, hours=5) == simulate(1980, hours=9)[:5]
    assert not set(simulate(1980, hours=5)) & set(simulate(1981, hours=5))


@pytest.mark.parametrize(
    "name, low, high",
    [
        ("T_2M", 230, 330),
        ("U_10M", -30, 50),
        ("V_10M", -40, 40),
        ("PMSL", 99_000, 104_000),
        ("ASOB_S", 0, 800),
        ("ATHB_S", -200, 0),
    ],
)
def test_values_are_finite_and_plausible(fields, name, low, high):
    assert np.isfinite(fields[name]).all()
    assert low <= fields[name].min() < fields[name].max() <= high


def test_energy_neither_grows_nor_dies(fields):
    energy = ((fields["U_10M"] - weather.WESTERLY) ** 2 + fields["V_10M"] ** 2).mean(axis=(1, 2))
    quarters = energy.reshape(4, -1).mean(axis=1)
    assert quarters.max() < 2 * quarters.min()
    assert quarters.min() > 1


def test_small_scales_hold_little_power(fields):
    power = np.abs(np.fft.fft2(fields["V_10M"])).astype(float) ** 2
    wave = np.hypot(*np.meshgrid(np.fft.fftfreq(SIZE, 1 / SIZE), np.fft.fftfreq(SIZE, 1 / SIZE)))
    spectrum = [power[:, np.rint(wave) == k].sum() for k in range(SIZE // 2)]
    assert 2 <= np.argmax(spectrum) <= 5  # near wave number 4, where it is stirred
    assert sum(spectrum[9:]) < sum(spectrum[3:6]) / 50


@pytest.mark.parametrize("name", ["U_10M", "V_10M", "PMSL"])
def test_persistence_errs_more_with_a_longer_lead(fields, name):
    errors = [np.square(fields[name][lead:] - fields[name][:-lead]).mean() for lead in (1, 2, 4, 8, 16)]
    assert errors == sorted(errors)
    assert errors[-1] > 10 * errors[0]


def test_the_sun_shines_by_day_and_more_in_summer():
    day = np.stack([weather.sunshine(hour, SIZE).numpy() for hour in range(24)])
    assert day.min() == 0 and 500 < day.max() <= 1000
    assert (day.min(axis=0) == 0).all()  # every place has a night on the first of January
    dark, bright = (sum(weather.sunshine(24 * d + h, SIZE).mean() for h in range(24)) for d in (0, 172))
    assert bright > 1.5 * dark
