"""Super-resolution's baseline: interpolation of what averaging leaves, plus the training years' mean error of each month."""

import numpy as np
import pytest
import torch
from conftest import write_year

from course_lib.config import Config
from course_lib.data.superres import SuperResolution
from course_lib.data.tasks import make_task
from course_lib.data.years import YearsDataset

month_of = np.array([*range(12), *range(7), *range(12), *range(12)])  # of each sample: the second year is cut short


@pytest.fixture
def months(tmp_path) -> YearsDataset:
    """Four years of monthly fields over a rough ground that is there every year, on an odd grid."""
    random = np.random.default_rng(0)
    ground = random.normal(0, 10, (12, 13, 18))
    for year, length in zip(range(1980, 1984), (12, 7, 12, 12)):
        write_year(tmp_path / f"A_{year}.nc", (280 + ground + random.normal(0, 1, ground.shape))[:length])
    return YearsDataset(tmp_path, lead=0)


@pytest.mark.parametrize("shape", [(16, 16), (73, 144), (13, 18), (5, 7)])
def test_a_constant_field_stays_as_it_is(shape):
    fine = torch.full((2, *shape), 7.0)
    torch.testing.assert_close(SuperResolution().interpolate(fine), fine, rtol=1e-6, atol=0)


@pytest.mark.parametrize("shape", [(16, 24), (73, 144)])
def test_only_the_averages_of_blocks_are_left(shape):
    generator = torch.Generator().manual_seed(0)
    fine = torch.randn(2, *shape, generator=generator)
    noise, rows, columns = torch.zeros_like(fine), shape[0] // 4 * 4, shape[1] // 4 * 4
    blocks = torch.randn(2, rows // 4, 4, columns // 4, 4, generator=generator)
    noise[:, :rows, :columns] = (blocks - blocks.mean(dim=(2, 4), keepdim=True)).reshape(2, rows, columns)
    interpolate = SuperResolution(4).interpolate
    torch.testing.assert_close(interpolate(fine + noise), interpolate(fine), rtol=0, atol=1e-5)
    assert (interpolate(fine) - fine).std() > 0.5  # and that is a loss


def test_a_smooth_field_is_nearly_kept():
    y, x = torch.meshgrid(torch.linspace(0, 1, 73), torch.linspace(0, 1, 144), indexing="ij")
    fine = torch.stack([x + 2 * y])
    error = (SuperResolution().interpolate(fine) - fine)[:, 8:64, 8:136]  # whole blocks, off the edges
    assert error.abs().max() < 0.01  # two grid points differ by up to 0.03
    assert error.mean().abs() < 1e-6  # and it is not shifted


def test_the_correction_is_the_mean_residual_of_each_month(months):
    transform = SuperResolution().fit(months)
    residuals = np.stack([(x - transform.interpolate(x)).numpy() for x, _ in months]).astype(float)
    expected = [residuals[month_of == month].mean(axis=0) for month in range(12)]
    np.testing.assert_allclose(transform.correction, expected, rtol=1e-5, atol=1e-6)


def test_a_fitted_baseline_is_right_on_average_in_each_month(months):
    before = np.stack([(y - SuperResolution()(x, y, (0, 0))[0]).numpy() for x, y in months])
    months.transform = transform = SuperResolution().fit(months)
    after = np.stack([(y - x[:1]).numpy() for x, y in months])
    for month in range(12):
        np.testing.assert_allclose(after[month_of == month].mean(axis=0), 0, atol=1e-5)
    assert np.square(after).mean() < np.square(before).mean() / 10
    for month, (x, _) in zip(month_of, months, strict=True):
        assert torch.equal(x[1:], transform.correction[month])  # the net is told the correction too


def test_the_task_fits_on_the_training_years_alone(months):
    task = make_task(Config(data=str(months.root), task="superres"))
    alone = YearsDataset(months.root, lead=0, years=[1980, 1981, 1982])
    assert torch.equal(task.valid.transform.correction, SuperResolution().fit(alone).correction)
    assert task.train.transform is task.valid.transform
    assert (task.inputs, task.outputs) == (2, 1)
    x, y = task.valid[0]
    assert x.shape == (2, 13, 18) and y.shape == (1, 13, 18)


def test_hourly_years_are_corrected_by_the_hour_of_the_day(years):
    task = make_task(Config(data=str(years), task="superres"))
    assert task.train.transform.correction.shape == (24, 6, 16, 16)
    assert torch.equal(task.train[0][0][6:], task.train[24][0][6:])
