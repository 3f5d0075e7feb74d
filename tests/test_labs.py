"""The break-it labs on real ranks: each case breaks as it should, right answers are right, and wrong ones are told why."""

import re
import sys
from functools import partial

import matplotlib
import pytest
import torch
from exercise_cells import code_cells, open_notebook, run_cell

from course_lib.checks import WrongAnswer, on_ranks
from course_lib.faults import ALL, FAULTS, REMEDIES
from course_lib.lab_rank import AROUND
from course_lib.lab_runs import GOOD, RANKS, how_it_ended, mend, said
from course_lib.labs import CASES, Case, _require_whole_epochs, good_events, victim
from course_lib.trial import TrialError

matplotlib.use("agg")
ENDS = {
    "fixed port taken": "rank 0 failed",
    "killed rank": "was ended by signal 9",
    "mismatched collective": "rank 0 did not come back, rank 1 did not come back, rank 2 did not come back",
    "uneven shards": "",  # gloo lets them hang, or ends some of them
    "forgotten barrier on save": "rank 1 failed (FileNotFoundError), rank 2 failed (FileNotFoundError)",
    "out of memory": "failed (RuntimeError)",
}  # the others finish


@pytest.fixture(scope="module")
def cases() -> dict[str, Case]:
    return {name: Case(name) for name in CASES}


@pytest.fixture(scope="module")
def answers() -> dict[str, dict]:
    """Those of the solutions."""
    found = {}
    for lab in (1, 2, 3):
        names: dict = {}
        for cell in code_cells(open_notebook("solutions", f"lab{lab}_break_it")):
            if cell.metadata.nbgrader.solution:
                run_cell(cell.source, names)
        found |= {f"{lab}{letter}": names[f"answer_{letter}"]() for letter in "abcd"}
    return found


def test_there_is_a_case_for_each_fault():
    assert list(CASES.values()) == list(FAULTS)
    assert len(FAULTS) == 12
    for fault in FAULTS.values():
        assert bool(fault.remedy) != bool(fault.edits)  # mended in the program, or not
        assert not fault.remedy or fault.remedy in REMEDIES
        assert not fault.around or fault.around in AROUND
        for good, _ in fault.edits:
            assert GOOD.read_text().count(good) == 1, good


@pytest.mark.parametrize("name", CASES)
def test_it_breaks_as_it_should_and_the_right_answer_is_right(name, cases, answers, capsys):
    case = cases[name]
    ended = how_it_ended(case.folder, case.codes)
    assert ENDS.get(case._what, "all ranks have finished") in ended, ended
    assert (ended == "all ranks have finished") == (case._what not in ENDS), ended
    case.check(lambda: answers[name])
    case.check_fix(lambda: answers[name])
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == ["right"] * 4


@pytest.mark.parametrize("name", CASES)
def test_a_fix_that_changes_nothing_is_refused(name, cases, answers):
    case, answer = cases[name], dict(answers[name])
    if case._fault.remedy:
        answer["fix"] = next(remedy for remedy in REMEDIES if remedy != case._fault.remedy)
        words = "does not help here"
    else:
        answer["fix"] = case.text.splitlines()[answer["line"] - 1]
        words = "still breaks|do not agree|expected"
    with pytest.raises(WrongAnswer, match=words):
        case.check_fix(lambda: answer)


@pytest.mark.parametrize(
    "name, fix, words",
    [
        ("2c", "sampler = list(range(len(train)))", "from 111 samples, which are only 37 images: they do not share"),
        ("2c", "sampler = []", "the program now makes steps in epochs []; it should in [0, 1]"),
        ("3d", "epochs, batch = 0, 12", "the program now makes steps in epochs []; it should in [0, 1]"),
    ],
)
def test_a_fix_with_which_all_ranks_end_alike_must_also_share_the_work(name, fix, words, cases, answers):
    with pytest.raises(WrongAnswer, match=re.escape(words)):
        cases[name].check_fix(lambda: answers[name] | {"fix": fix})


def noted(*shares: range | list, steps: int = 1) -> list[dict]:
    """What ranks would note if each learnt from its share in both epochs."""
    return [
        {"event": "step", "rank": rank, "epoch": epoch, "samples": list(share[step::steps])}
        for rank, share in enumerate(shares)
        for epoch in (0, 1)
        for step in range(steps)
    ]


def test_work_is_shared_if_all_ranks_make_equally_many_steps_and_nearly_all_images_are_seen_once():
    _require_whole_epochs(noted(range(12), range(12, 24), range(24, 36), steps=3), "")  # one is left out
    _require_whole_epochs(noted(range(13), range(13, 26), [*range(26, 37), 0, 1]), "")  # or two are repeated
    for wrong, words in (
        (noted(range(13), range(13, 25), range(25, 37))[1:], "in epoch 0 the ranks make [0, 1, 1] steps"),
        (noted(range(5), range(5, 10), range(10, 15)), "in epoch 0 only 15 of 37 images are learnt from"),
        ([note | {"epoch": 0} for note in noted(range(37), [], [])], "makes steps in epochs [0]"),
    ):
        with pytest.raises(WrongAnswer, match=re.escape(words)):
            _require_whole_epochs(wrong, "")


def test_ddp_sends_buffers_in_the_case_of_batchnorm(cases):
    """And only there, as lab 3 says."""
    for name in ("3a", "3c"):
        rows = cases[name].flight_recorder().rows
        assert any("broadcast" in row[1] for row in rows) == (name == "3c"), rows


def test_ddp_sends_the_buffers_of_rank_0_before_each_forward_and_then_every_rank_adds_its_own():
    """What lab 3 says about its case c."""

    def learn(rank):
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.BatchNorm1d(1))
        for step in range(3):
            model(torch.full((2, 1), 10.0 * step + rank)).sum().backward()
        found = [model.module.running_mean.item()]
        model.eval()
        with torch.no_grad():
            for _ in range(2):
                model(torch.zeros(2, 1))
                found.append(model.module.running_mean.item())
                model.module.running_mean += rank
        return found

    (first, *_), (second, *evaluated) = on_ranks(2, learn)
    assert first == pytest.approx(0.9 * (0.1 * 10) + 0.1 * 20)
    assert second == pytest.approx(first + 0.1)  # by its last batch alone
    assert evaluated == pytest.approx([first, first + 1])  # without gradients they are sent before the first pass only


@pytest.mark.parametrize("name", CASES)
def test_the_other_faults_of_a_lab_and_another_line_are_refused(name, cases, answers):
    case, answer = cases[name], answers[name]
    for other in (fault for near, fault in CASES.items() if near[0] == name[0] and near != name):
        words = f"not {other!r}. There {FAULTS[other].shows}: do you see that here?"
        with pytest.raises(WrongAnswer, match=re.escape(words)):
            case.check(partial(dict, answer, what=other))
    with pytest.raises(WrongAnswer, match="line 1 is `import json`; .*does not come from there"):
        case.check(lambda: answer | {"line": 1})


@pytest.mark.parametrize(
    "name, wrong, words",
    [
        ("1a", {"what": "straggler"}, "one rank computes for long"),
        ("1a", {"what": "gremlins"}, f"choose one of {min(FAULTS)}, "),
        (
            "1a",
            {"rank": 1},
            'not 1. Which rank does or suffers what the others don\'t? ("all", if no rank is special)',
        ),
        ("1a", {"line": 48}, "line 48 is `model = nn.Sequential(`; it may be mended there, too, but"),
        ("1a", {"line": 0}, "it is a number from 1 to"),
        ("1d", {"rank": 1}, "not 1."),
        ("1d", {"rank": "1"}, '"rank" is \'1\'; it is a number from 0 to 2, or "all"'),
        ("3d", {"what": "slow storage"}, "load for long in every step"),
    ],
)
def test_a_wrong_diagnosis_is_told_what_to_look_at(name, wrong, words, cases, answers):
    with pytest.raises(WrongAnswer, match=re.escape(words)):
        cases[name].check(lambda: answers[name] | wrong)


def test_a_remedy_does_not_replace_a_fix_and_a_line_no_remedy(cases, answers):
    with pytest.raises(WrongAnswer, match="the program itself can be mended"):
        cases["1a"].check_fix(lambda: answers["1a"] | {"fix": "restart"})
    with pytest.raises(WrongAnswer, match="'pass' is no remedy's name, and the program is not to blame here"):
        cases["3a"].check_fix(lambda: answers["3a"] | {"fix": "pass"})


@pytest.mark.parametrize(
    "name, fix, words",
    [
        ("1a", "torch.manual_seed(", "still breaks: rank 0 failed (SyntaxError), .*SyntaxError: .*line 47"),
        ("1a", "torch.manual_seed(7)", "rank 0, note \"step\" in epoch 0: 'loss': "),
        (
            "1d",
            'dist.init_process_group("gloo", init_method="tcp://127.0.0.1:29512", rank=rank, world_size=ranks)',
            "again",
        ),
        ("3c", "nn.BatchNorm2d(8, track_running_stats=False),", "each still normalises by its own share"),
        ("2c", "sampler = DistributedSampler(train, drop_last=True)", "line \\d+: TypeError: .*DistributedSampler"),
    ],
)
def test_a_fix_that_is_none_is_told_why(name, fix, words, cases, answers):
    with pytest.raises(WrongAnswer, match=words.replace("(", r"\(").replace(")", r"\)")):
        cases[name].check_fix(lambda: answers[name] | {"fix": fix})


def test_an_answer_may_look_at_its_case(cases, answers, capsys):
    line = "torch.manual_seed(rank)"
    case = cases["1a"]
    case.check(lambda: answers["1a"] | {"line": 1 + case.text.splitlines().index(line)})
    assert capsys.readouterr().out.count("right") == 3


def test_an_answer_must_be_complete(cases):
    def unwritten():
        raise NotImplementedError

    with pytest.raises(TrialError, match="unwritten is still to be written"):
        cases["1a"].check(unwritten)
    with pytest.raises(WrongAnswer, match="a dictionary with what, rank, line, fix"):
        cases["1a"].check(lambda: {"what": "straggler"})
    with pytest.raises(WrongAnswer, match='"fix" is None; it is a line of the program'):
        cases["1a"].check_fix(lambda: {"what": "straggler", "rank": 0, "line": 1, "fix": None})


def test_another_seed_may_mean_another_rank():
    found = {victim("3a", seed) for seed in range(20)}
    assert found == set(range(RANKS)) and victim("1a", 5) == ALL


def test_the_evidence_can_be_read(cases, capsys):
    cases["2a"].printed()
    printed = capsys.readouterr().out
    assert re.search("Connection (closed|reset) by peer", printed)
    victim = cases["2a"]._rank
    table = cases["2a"].flight_recorder()
    assert table.rows[-1][1 + victim] == "–" and "all_reduce" in table.rows[-1][1 + (victim + 1) % RANKS]
    cases["2b"].stacks()
    line = 1 + cases["2b"].text.splitlines().index(
        f"        if rank == {cases['2b']._rank}: dist.barrier()  # before the log is written"
    )
    assert f"rank {cases['2b']._rank}: line {line} of the program" in capsys.readouterr().out
    row = next(row for row in cases["2b"].flight_recorder().rows if len(set(row[1:])) > 1)
    assert row[1 + cases["2b"]._rank] == "barrier"
    weights, good = ({row[1] for row in table.rows} for table in (cases["1a"].events("start"), good_events("start")))
    assert (len(weights), len(good)) == (RANKS, 1)
    worse, good = (table.rows[-1][-1] for table in (cases["1a"].events("valid"), good_events("valid")))
    assert float(worse) > 1.05 * float(good)  # as the lab's text says
    cases["3a"].program()
    if sys.platform == "linux":  # on a Mac the lab's text says it
        assert "you tried to allocate 12582912 bytes" in said(cases["3d"].folder, 0)


@pytest.mark.parametrize("name", CASES)
def test_every_kind_of_evidence_can_be_asked_for_in_every_case(name, cases, capsys):
    case = cases[name]
    case.printed()
    case.stacks()
    case.program()
    capsys.readouterr()
    case.timeline()
    empty = "the timeline is empty: no rank has begun its first step\n"
    assert capsys.readouterr().out == (empty if case._what == "fixed port taken" else "")
    assert bool(case.flight_recorder().rows) == (case._what not in ("fixed port taken", "out of memory"))
    for kind in ("start", "step", "evaluated", "valid", "end"):
        assert case.events(kind).titles[0] == "rank"


def test_a_case_does_not_tell_its_answer_by_completion(cases):
    public = {name for name in dir(cases["1a"]) if not name.startswith("_")}
    evidence = {"events", "flight_recorder", "printed", "program", "stacks", "timeline"}
    assert public == evidence | {"check", "check_fix", "codes", "folder", "name", "text"}


@pytest.mark.parametrize("lab", [1, 2, 3])
def test_each_case_has_three_hints(lab):
    """Between the cell to write in and its first check."""
    hints: list[list[str]] = []
    for cell in open_notebook("exercises", f"lab{lab}_break_it").cells:
        if cell.metadata.get("nbgrader", {}).get("solution"):
            hints.append([])
        elif cell.cell_type == "markdown" and hints and not hints[-1]:
            hints[-1] = re.findall(r"<summary>Hint (\d)</summary>", cell.source)
    assert hints == [["1", "2", "3"]] * 4


def test_mend_keeps_the_indentation():
    text = "for i in x:\n    a\n    b\n"
    assert mend(text, 2, "c\nd") == "for i in x:\n    c\n    d\n    b\n"
    assert mend(text, 2, "if i:\n    c") == "for i in x:\n    if i:\n        c\n    b\n"
    assert mend(text, 2, "    c\ne") == "for i in x:\n    c\ne\n    b\n"  # as it stands in the program
    assert compile(mend(text, 2, ""), "", "exec")


def test_all_means_no_rank_is_special(cases):
    assert cases["1b"]._rank == ALL
