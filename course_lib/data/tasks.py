"""From a config to what is learned: the training and the validation set, and the shapes that go in and come out."""

from dataclasses import dataclass

from torch.utils.data import Dataset

from course_lib.config import Config, UserError, parse_years
from course_lib.data.cells import CellsDataset
from course_lib.data.digits import DigitsDataset
from course_lib.data.superres import SuperResolution
from course_lib.data.years import YearsDataset, find_files
from course_lib.scores import Accuracy, Overlap, SquaredError
from course_lib.world import World, barrier


@dataclass(frozen=True)
class Task:
    """Two datasets, normalised alike, and how a prediction is judged.

    residual: the target is like the input's first channels, so a net may learn the change.
    """

    train: Dataset
    valid: Dataset
    inputs: int
    outputs: int
    score: SquaredError | Overlap | Accuracy
    residual: bool = False


def split_years(config: Config) -> tuple[list[int], list[int]]:
    """The years to train on and the years held out, which must not overlap."""
    found = list(find_files(config.data))
    valid = parse_years(config.valid_years, "--valid-years") if config.valid_years else found[-1:]
    train = parse_years(config.train_years, "--train-years") if config.train_years else sorted(set(found) - set(valid))
    if not train:
        raise UserError(f"{config.data} has only the year {found[0]}: nothing is left to train on; make more years")
    if both := sorted(set(train) & set(valid)):
        raise UserError(f"year {both[0]} is in --train-years and in --valid-years: a model must not be judged by it")
    return train, valid


def make_task(config: Config, world: World = World()) -> Task:
    """Open the data that a config names; the first rank passes over the files if their statistics are not known yet."""
    if config.task == "segment":
        return Task(*(CellsDataset(config.data, part) for part in ("train", "valid")), 1, 1, Overlap())
    if config.task == "digits":
        return Task(*(DigitsDataset(config.data, part) for part in ("train", "valid")), 28, 10, Accuracy())
    if config.task == "squad":
        from course_lib.data.squad import SquadDataset  # tokenizers take a second to import

        train, valid = (SquadDataset.open(config, part) for part in ("train", "valid"))
        return Task(train, valid, 3, 2, valid.score)
    train_years, valid_years = split_years(config)
    variables = config.variables.split(",") if config.variables else None

    def dataset(years: list[int], **options) -> YearsDataset:
        lead = config.lead if config.task == "forecast" else 0
        return YearsDataset(config.data, variables, lead, years=years, **options)

    train = dataset(train_years)
    for turn in (True, False):  # rank 0 first: the others then read what it found
        if world.is_main == turn:
            valid = dataset(valid_years, normalise=train.normalisation)
            _ = valid.normalisation
        barrier(world)
    channels, score = len(train.variables), SquaredError(train.variables)
    if config.task == "forecast":
        return Task(train, valid, channels, channels, score, residual=True)
    monthly = train.headers[0][0].shape[0] <= 12
    train.transform = valid.transform = SuperResolution().fit(train, period=12 if monthly else 24)
    return Task(train, valid, 2 * channels, channels, score, residual=True)
