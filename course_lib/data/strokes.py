"""Digits as a pen draws them: a few strokes, leaning, shifted and shaken, thin or thick. For where the real ones are not."""

import math

import numpy as np

SIZE = 28
INK = np.mgrid[:SIZE, :SIZE][::-1].reshape(2, -1).T + 0.5  # the middle of each pixel, (x, y)


def _arc(x: float, y: float, wide: float, high: float, first: float, last: float) -> list[tuple[float, float]]:
    """Points on an ellipse from one angle to another, in degrees: 0 is right, 90 is down."""
    angles = np.radians(np.linspace(first, last, 13))
    return [(x + wide * math.cos(angle), y + high * math.sin(angle)) for angle in angles]


WAYS = [  # for each digit the ways to write it, each a list of strokes; x from 0 to 1, y downwards
    [[_arc(0.5, 0.5, 0.34, 0.5, -80, 280)], [_arc(0.5, 0.5, 0.26, 0.5, -100, 260)]],
    [[[(0.5, 0), (0.5, 1)]], [[(0.3, 0.22), (0.52, 0), (0.52, 1)]]],
    [
        [[*_arc(0.5, 0.27, 0.32, 0.27, 190, 380), (0.12, 1), (0.9, 1)]],
        [[*_arc(0.5, 0.27, 0.3, 0.27, 190, 400), *_arc(0.3, 0.88, 0.17, 0.12, 300, 40), (0.9, 0.97)]],
    ],
    [
        [[*_arc(0.45, 0.25, 0.3, 0.25, 200, 445), *_arc(0.45, 0.74, 0.36, 0.26, -85, 160)]],
        [[(0.15, 0), (0.8, 0), (0.42, 0.4), *_arc(0.42, 0.7, 0.36, 0.3, -90, 150)]],
    ],
    [
        [[(0.62, 0), (0.1, 0.66), (0.92, 0.66)], [(0.66, 0.35), (0.66, 1)]],
        [[(0.2, 0), (0.15, 0.5), (0.8, 0.5)], [(0.8, 0), (0.76, 1)]],
    ],
    [
        [[(0.82, 0), (0.26, 0), (0.2, 0.44), *_arc(0.45, 0.69, 0.36, 0.31, 230, 500)]],
        [[(0.25, 0.02), (0.2, 0.42), *_arc(0.45, 0.69, 0.34, 0.3, 240, 510)], [(0.25, 0.02), (0.85, 0)]],
    ],
    [
        [[(0.7, 0), *_arc(0.5, 0.7, 0.34, 0.3, 200, -160)]],
        [[*_arc(0.75, 0.6, 0.6, 0.6, 260, 185), *_arc(0.48, 0.74, 0.33, 0.26, 180, -180)]],
    ],
    [[[(0.1, 0), (0.88, 0), (0.4, 1)]], [[(0.1, 0.05), (0.88, 0), (0.42, 1)], [(0.35, 0.5), (0.85, 0.5)]]],
    [
        [_arc(0.5, 0.24, 0.27, 0.24, 90, 450), _arc(0.5, 0.74, 0.33, 0.26, -90, 270)],
        [[*_arc(0.5, 0.24, 0.25, 0.24, -20, -270), *_arc(0.5, 0.74, 0.28, 0.26, -90, 270), (0.73, 0.15)]],
    ],
    [
        [_arc(0.48, 0.3, 0.3, 0.3, 0, 360), [(0.78, 0.2), (0.74, 1)]],
        [[*_arc(0.48, 0.28, 0.3, 0.28, -30, -360), (0.74, 0.7), *_arc(0.45, 0.76, 0.3, 0.24, 20, 130)]],
    ],
]


def draw(digit: int, random: np.random.Generator) -> np.ndarray:
    """One image (28, 28) of uint8, as no other."""
    ways = WAYS[digit]
    strokes = [np.array(stroke) - 0.5 for stroke in ways[random.integers(len(ways))]]
    turn, lean = random.normal(0, 0.13), random.normal(0.12, 0.22)
    wide, high = random.uniform(11, 18), random.uniform(16, 20.5)
    shape = np.array([[1, 0], [-lean, 1]]) @ np.diag([wide, high])
    shape = shape @ np.array([[math.cos(turn), math.sin(turn)], [-math.sin(turn), math.cos(turn)]])
    middle = SIZE / 2 + random.normal(0, 1.2, 2)
    thick = random.uniform(0.8, 2.0)
    ink = np.zeros(SIZE * SIZE)
    for stroke in strokes:
        shaken = stroke @ shape + middle + _tremor(len(stroke), random)
        ink = np.maximum(ink, np.clip(thick + 0.6 - _distance(shaken), 0, 1))
    noisy = ink * random.uniform(0.75, 1) + random.normal(0, 0.04, ink.shape) * (ink > 0)
    return (255 * np.clip(noisy, 0, 1)).astype(np.uint8).reshape(SIZE, SIZE)


def _tremor(points: int, random: np.random.Generator) -> np.ndarray:
    """The hand strays, but slowly: a shift of each point that is like that of the one before."""
    steps = np.cumsum(random.normal(0, 1.0 / math.sqrt(points), (points, 2)), axis=0)
    return steps - steps.mean(axis=0) + random.normal(0, 0.35, 2)


def _distance(stroke: np.ndarray) -> np.ndarray:
    """From each pixel to the nearest point of a stroke: of each straight piece, the nearest of all."""
    begins, ways = stroke[:-1], np.diff(stroke, axis=0)
    there = ((INK[:, None] - begins) * ways).sum(axis=2) / np.maximum((ways**2).sum(axis=1), 1e-9)
    nearest = begins + np.clip(there, 0, 1)[..., None] * ways
    return np.sqrt(((INK[:, None] - nearest) ** 2).sum(axis=2)).min(axis=1)
