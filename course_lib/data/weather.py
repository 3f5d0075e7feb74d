"""A small weather: one year of hourly fields from a pseudo-spectral solver, the same every time for the same year.

The planet is a doubly periodic β-plane. Vorticity is stirred, damped and carried by its own wind; temperature is carried
by that wind, drawn towards a north-south profile and heated by a sun that goes round once a day; clouds follow the cyclones.
"""

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch.fft import irfft2, rfft2

VARIABLES = {  # name: (units, long name), as in the forecaster that this course grew from
    "T_2M": ("K", "2 m temperature"),
    "U_10M": ("m s-1", "10 m wind towards the east"),
    "V_10M": ("m s-1", "10 m wind towards the north"),
    "PMSL": ("Pa", "mean sea level pressure"),
    "ASOB_S": ("W m-2", "net short-wave radiation at the surface"),
    "ATHB_S": ("W m-2", "net long-wave radiation at the surface"),
}

DOMAIN = 6.0e6  # m, both ways
BETA = 1.6e-11  # 1/(m s), how the planet's rotation changes northwards
CORIOLIS = 1.0e-4  # 1/s, turns the stream function into pressure
WESTERLY = 12.0  # m/s, the mean wind
STIRRING = 2.0e-10  # 1/s², strength of the random forcing of vorticity
STIRRING_MEMORY = 12 * 3600.0  # s
DRAG = 1 / (6 * 86400.0)  # 1/s
RELAXATION = 5 * 86400.0  # s, temperature back to its profile
HEATING = 6e-7  # K/s for each W/m² of sunshine above the day's mean
SPIN_UP = 240  # hours thrown away before the year begins


def sunshine(hour: float, size: int) -> torch.Tensor:
    """Short-wave radiation under a clear sky in W/m² at an hour of the year: (y, x)."""
    position = (torch.arange(size) + 0.5) / size
    latitude = math.radians(75) * (1 - torch.cos(2 * math.pi * position)) / 2  # warm edges, a cold middle
    declination = math.radians(-23.4) * math.cos(2 * math.pi * (hour / 24 + 10) / 365.25)
    noon = 2 * math.pi * (hour / 24 + position)  # the sun moves one domain a day
    height = torch.sin(latitude)[:, None] * math.sin(declination)
    height = height - torch.cos(latitude)[:, None] * math.cos(declination) * torch.cos(noon)[None, :]
    return 1000.0 * height.clamp(min=0)


def simulate(year: int, *, hours: int, size: int = 64) -> Iterator[np.ndarray]:
    """Yield (variable, y, x) float32 for each hour of the year, in the order of VARIABLES."""
    steps = max(3, math.ceil(size / 16))  # an hour's time steps: finer grids need shorter ones
    dt = 3600.0 / steps
    generator = torch.Generator().manual_seed(year)

    # Wave numbers, the inverse Laplacian, a 2/3 filter against aliasing and the damping of one step.
    waves = torch.fft.fftfreq(size, 1 / size) * 2 * math.pi / DOMAIN
    ky, kx = torch.meshgrid(waves, waves[: size // 2 + 1].abs(), indexing="ij")
    k2 = kx**2 + ky**2
    inverse_laplacian = torch.where(k2 > 0, -1 / k2.clamp(min=1e-30), torch.zeros_like(k2))
    k_max = math.pi * size / DOMAIN
    keep = ((kx.abs() < 2 / 3 * k_max) & (ky.abs() < 2 / 3 * k_max)).float()
    smooth = (k2 / k_max**2) ** 4
    damp = torch.stack([torch.exp(-(smooth / 3600 + DRAG) * dt), torch.exp(-smooth / 1200 * dt)]) * keep
    i_kx, i_ky = 1j * kx, 1j * ky
    ring = torch.exp(-((k2.sqrt() * DOMAIN / (2 * math.pi) - 4) ** 2)) * keep  # stirred at wave number 4
    ring[0, 0] = 0
    ring = ring * size / torch.sqrt(ring[:, 0].square().sum() + 2 * ring[:, 1:].square().sum())  # noise of variance 1

    def noise() -> torch.Tensor:
        return rfft2(torch.randn(size, size, generator=generator)) * ring

    position = (torch.arange(size) + 0.5) / size
    profile = (288 + 15 * torch.cos(2 * math.pi * position))[:, None].expand(size, size)
    state = torch.stack([noise() * 2e-5, rfft2(profile)])  # vorticity and temperature, as spectra
    stirring = noise() * STIRRING
    memory = math.exp(-3600 / STIRRING_MEMORY)
    changes = []  # the newest first

    for hour in range(-SPIN_UP, hours):
        cloud = torch.sigmoid(irfft2(state[0]) / 2e-5 - 0.5)
        short_wave = 0.8 * sunshine(hour, size) * (1 - 0.7 * cloud)
        warming = rfft2(profile / RELAXATION + HEATING * (short_wave - short_wave.mean(dim=1, keepdim=True)))
        forcing = torch.stack([stirring, warming])
        for step in range(steps):
            stream = inverse_laplacian * state[0]
            spectra = torch.cat([stream[None], state])
            along_x, along_y = irfft2(torch.stack([i_kx * spectra, i_ky * spectra]))
            u, v = WESTERLY - along_y[0], along_x[0]
            if hour >= 0 and step == 0:
                air = irfft2(state[1])
                long_wave = -0.25 * 5.67e-8 * air**4 * (1 - 0.6 * cloud)
                pressure = 101325 + 1.2 * CORIOLIS * irfft2(stream)
                yield torch.stack([air, u, v, pressure, short_wave, long_wave]).numpy()
            carried = u * along_x[1:] + v * along_y[1:]
            carried[0] += BETA * v
            change = forcing - rfft2(carried)
            change[1] -= state[1] / RELAXATION
            changes = [change, *(changes or [change, change])][:3]
            state = state + dt / 12 * (
                23 * changes[0] - 16 * changes[1] + 5 * changes[2]
            )  # third-order Adams-Bashforth
            state = state * damp
        stirring = memory * stirring + math.sqrt(1 - memory**2) * STIRRING * noise()
