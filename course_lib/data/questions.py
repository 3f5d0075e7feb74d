"""Questions about paragraphs, in the format of SQuAD 2.0: and where in the paragraph each answer stands.

    Ann has bought a hammer, a violin, an apple and a coat.
    Which tool did Ann buy?                        hammer
    What fruit has Ann brought home?               apple
    Which mammal did Ann buy?                      (no answer)

The sentences are made from patterns. But no paragraph says that a hammer is a tool: one has to know what words mean, and every
answer has at least three rivals that stand just where it might. A quarter of the questions have no answer.

Validation is about other things and other people, in other words: none of them occurs in training. So what a net learns about
"saw" and "drill" does not help it with "hammer", unless it knows already that they are alike.
"""

import json
import random
from collections.abc import Sequence
from pathlib import Path

from course_lib.data.folder import fill

THINGS = {
    "mammal": "dog cat horse cow pig goat sheep rabbit donkey camel monkey fox wolf bear lion tiger",
    "bird": "duck goose hen eagle owl crow swan parrot dove hawk sparrow pigeon",
    "fish": "trout herring tuna salmon pike carp eel cod perch sardine mackerel shark",
    "fruit": "apple pear plum cherry peach banana melon orange mango fig coconut lemon strawberry raspberry pineapple grape",
    "drink": "tea milk juice coffee beer cocoa cider wine lemonade vodka rum whisky brandy champagne ale water",
    "tree": "pine birch maple oak elm beech fir willow poplar spruce cypress cedar",
    "flower": "tulip lily daisy rose orchid poppy iris sunflower carnation lavender violet daffodil",
    "tool": "saw drill chisel hammer wrench rake spade shovel ladder plough screwdriver axe",
    "musical instrument": "piano flute cello trumpet guitar harp clarinet drum trombone banjo oboe violin",
    "piece of clothing": "coat shirt hat scarf jacket skirt sock dress glove belt vest sweater blouse apron robe cloak",
    "piece of furniture": "table bed sofa chair shelf cupboard bench desk stool wardrobe cabinet couch",
    "vehicle": "car bus tram bicycle boat train van ship wagon canoe ferry tractor motorcycle scooter taxi truck",
    "metal": "iron gold tin copper zinc nickel bronze silver brass platinum titanium steel",
    "gem": "ruby pearl sapphire diamond opal topaz jade emerald",
}
SOME = ("metal", "drink")  # some copper, but a hammer
PEOPLE = (
    "Ann Bob Carl Dora Emil Fay Gus Hanna Ivan Jane Karl Lena Max Nora Otto Paula Rosa Sam Tim Vera "
    "Adam Bella Cora Dirk Ella Finn Greta Hugo Ida John Kim Lars Mary Nils Olga Paul Rita Sven Tom Uma"
)
TOLD = [  # every fourth is held out, of everything: words, people, patterns
    "{name} has bought {things}.",
    "{name} came home from the market with {things}.",
    "In the evening {name} had {things}.",
    "On the list of {name} were {things}.",
]
ASKED = [
    "Which {kind} did {name} buy?",
    "What {kind} has {name} brought home?",
    "Name the {kind} that {name} got.",
    "What sort of {kind} does {name} have now?",
]
BETWEEN = [
    "It was a cold day, and the streets were nearly empty.",
    "Then it began to rain, and everybody ran for shelter.",
    "Nobody had expected that, least of all the neighbours.",
    "The others had left long before, and so it was quiet.",
]
LONG = 8  # one paragraph in so many is about three people, and too long for a small window


def make(out: Path, *, count: int, seed: int = 0) -> None:
    """Fill a folder with train.json and valid.json unless it is filled; it appears as a whole or not at all."""

    def files(folder: Path) -> list[Path]:
        for name, content in write(count, seed).items():
            (folder / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        return [folder / name for name in ("train.json", "valid.json")]

    fill(out, f"generated questions, {count} paragraphs, seed {seed}", files)


def write(count: int, seed: int = 0) -> dict[str, dict]:
    """{train.json: …, valid.json: …}: so many paragraphs to train on, and a twentieth as many to judge by, at least eight."""
    chance, made = random.Random(seed), {}
    for name, number in (("train.json", count), ("valid.json", max(LONG, count // 20))):
        part = name.removesuffix(".json")
        paragraphs = [
            _paragraph(chance, part, f"{part}-{index}", people=3 if index % LONG == LONG - 1 else 1)
            for index in range(number)
        ]
        made[name] = {"version": "v2.0", "data": [{"title": "Errands", "paragraphs": paragraphs}]}
    return made


def share(several: Sequence[str], part: str) -> list[str]:
    """What a part may use: validation every fourth, training the rest."""
    return [one for number, one in enumerate(several) if (number % 4 == 3) == (part == "valid")]


def _paragraph(chance: random.Random, part: str, name: str, *, people: int) -> dict:
    """What some people have bought, one thing of a kind; three questions with an answer, and one without."""
    numbers = [3] * people if people > 1 else [chance.choice((4, 5))]
    *kinds, absent = chance.sample(list(THINGS), sum(numbers) + 1)
    context, known = "", {}
    buyers, fillers = chance.sample(share(PEOPLE.split(), part), people), chance.sample(BETWEEN, people)
    for turn, buyer in enumerate(buyers):
        context += f" {fillers[turn]} " if turn else ""
        before, after = chance.choice(share(TOLD, part)).replace("{name}", buyer).split("{things}")
        context += before
        first, last = sum(numbers[:turn]), sum(numbers[: turn + 1]) - 1
        for number, kind in enumerate(kinds[first : last + 1], first):
            thing = chance.choice(share(THINGS[kind].split(), part))
            context += " and " if number == last else ", " if number > first else ""
            context += "some " if kind in SOME else "an " if thing[0] in "aeiou" else "a "
            known[kind] = (buyer, thing, len(context))
            context += thing
        context += after
    asked = [*chance.sample(kinds, 3), absent]
    chance.shuffle(asked)
    questions = []
    for number, kind in enumerate(asked):
        who, thing, start = known.get(kind, (buyer, "", 0))
        text = chance.choice(share(ASKED, part)).format(kind=kind, name=who)
        answers = [{"text": thing, "answer_start": start}] if thing else []
        questions.append({"id": f"{name}-{number}", "question": text, "answers": answers, "is_impossible": not answers})
    return {"context": context, "qas": questions}
