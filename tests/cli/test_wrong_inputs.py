"""Wrong inputs that new users give: one line, exit code 2, the right advice, and no value of a record."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from command import Command

SECRETS = ("37.125", "HIVPOS", "WESTCLINIC", "91.625")  # values of records
ROWS = [
    f"{20 + i % 60}.5,{('never', 'now')[i % 2]},{('WESTCLINIC', 'EAST')[i // 2 % 2]},{'ny'[i % 3 == 0]}"
    for i in range(80)
]
TABLE = "\n".join(["age,smoker,clinic,ill", *ROWS, "37.125,now,EAST,y", "91.625,never,EAST,n"]) + "\n"
RUN = """
task = "table/logistic"
learners = 2
epochs = 1
batch_size = 8
[options]
path = "t.csv"
label = "ill"
classes = ["n", "y"]
site = "clinic"
ranges = {age = [0, 100]}
categories = {smoker = ["never", "now"]}
[privacy]
mode = "private"
epsilon = 3
delta = 1e-4
"""
OWN = """
import torch
from torch import nn
from adp2sgd import Records, Task

def records(n=64):
    x = torch.arange(3.0 * n).view(n, 3) / n
    x[5, 1] = 37.125
    return Records(x, (x[:, 0] > 1).long())

class Endless(torch.utils.data.Dataset):
    def __getitem__(self, index):
        return torch.zeros(3), 0

def task(**changes) -> Task:
    return Task(**{"model": lambda: nn.Linear(3, 2), "train": records(), "test": records(), **changes})

def nan() -> Task:
    train = records()
    train.inputs[17, 2] = float("nan")
    return task(train=train)

def infinite_target() -> Task:
    part = records()
    targets = part.inputs[:, :1].clone()
    targets[9] = float("inf")
    one = Records(part.inputs, targets)
    squared = lambda outputs, targets: (outputs - targets).square().mean(1)
    return task(model=lambda: nn.Linear(3, 1), train=one, test=one, loss=squared, metrics=())

def no_parameters() -> Task:
    return task(model=nn.ReLU)

def no_length() -> Task:
    return task(train=Endless())

def pixels() -> Task:
    images = Records(torch.zeros(64, 1, 4, 4), torch.zeros(64, 4, 4).long())
    return task(model=lambda: nn.Conv2d(1, 3, 3, padding=1), train=images, test=images)

def batchnorm() -> Task:
    return task(model=lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))

def wrong_width() -> Task:
    return task(model=lambda: nn.Linear(5, 2))

def shouting() -> Task:
    raise ValueError("37.125 HIVPOS")

def nothing() -> Task:
    return None

def undeclared():
    return task()

def instance() -> Task:
    return task(model=nn.Linear(3, 2))

def unequal() -> Task:
    return task(train=(torch.zeros(5, 3), torch.zeros(4)))
"""


@dataclass(frozen=True)
class Case:
    """`words`: what the line holds. `table` and `run` change the two files: (what stands there, what instead)."""

    words: tuple[str, ...]
    table: tuple[str, str] = ("", "")
    run: tuple[str, str] = ("", "")
    settings: tuple[str, ...] = ()
    arguments: str = "simulate run.toml"
    files: dict[str, str] = field(default_factory=dict)


def own(name: str, *words: str, mode: str = "private") -> Case:
    """A task of the user's own."""
    settings = (f"task=own:{name}", "options=", "learners=2", "data.partition=iid", f"privacy.mode={mode}")
    return Case(words, settings=settings, run=(RUN[RUN.index("[options]") : RUN.index("[privacy]")], ""))


CASES = {
    # ---- the table
    "a word among numbers": Case(("record 81", "'age' is no number", "correct it"), table=("37.125", "HIVPOS")),
    "infinity": Case(("record 81", "'age' is not finite", "leave it empty"), table=("37.125", "inf")),
    "a decimal comma": Case(("record 81", 'options.decimal = ","'), table=("37.125", '"37,125"')),
    "a category that is not declared": Case(
        ("record 81", "'smoker' is none of its categories", "add a category"),
        table=("37.125,now", "37.125,HIVPOS"),
    ),
    "a class that is not declared": Case(
        ("'ill' is none of the classes",), table=("37.125,now,EAST,y", "1,now,EAST,HIVPOS")
    ),
    "no label": Case(("record 81", "'ill' lacks a label"), table=("37.125,now,EAST,y", "37.125,now,EAST,")),
    "no site": Case(("record 81", "'clinic' names no site", "fill it in"), table=("37.125,now,EAST", "37.125,now,")),
    "a short row": Case(
        ("record 81 has 3 fields instead of 4", "complete it"), table=("37.125,now,EAST,y", "37.125,now,EAST")
    ),
    "two columns of one name": Case(("columns 1 and 2 alike", "rename one"), table=("age,smoker", "age,age")),
    "no header": Case(("none of the 4", "first line"), table=("age,smoker,clinic,ill\n", "")),
    "no records": Case(("no record",), table=(TABLE.partition("\n")[2], "")),
    "an empty file": Case(("no record",), table=(TABLE, "")),
    "semicolons": Case(
        ("is none of the 1", "options.delimiter"),
        table=(TABLE, TABLE.replace(",", ";")),
        settings=('options.delimiter=","',),
    ),
    "another encoding": Case(("UTF-8", "byte", "options.encoding"), table=("37.125", "37.125é")),
    "a date of another form": Case(
        ("'age' is no date", "options.date_format"), run=("age = [0, 100]", 'age = ["2020-01-01", "2021-01-01"]')
    ),
    # ---- what is declared about it
    "a range that is a number": Case(("age = 5 is no range", "[low, high]"), run=("[0, 100]", "5")),
    "a range without width": Case(("low < high",), run=("[0, 100]", "[5, 5]")),
    "a range of words": Case(("two numbers, or two dates",), run=("[0, 100]", '["low", "high"]')),
    "a range of three": Case(("is no range", "[low, high]"), run=("[0, 100]", "[0, 50, 100]")),
    "a range for no column": Case(
        ("'weight' is none of the 4",), run=("age = [0, 100]", "age = [0, 100], weight = [0, 9]")
    ),
    "a range and categories": Case(
        ("'smoker' has options.ranges and options.categories",),
        run=("age = [0, 100]", "age = [0, 100], smoker = [0, 9]"),
    ),
    "an open range": Case(("'age'", "options.ranges"), run=("[0, 100]", "[]")),
    "open categories": Case(("'smoker'", "options.categories"), run=('["never", "now"]', "[]")),
    "open classes": Case(("'ill'", "options.classes"), run=('["n", "y"]', "[]")),
    "categories that are no list": Case(("is no list",), run=('["never", "now"]', '"now"')),
    "one class": Case(("name two or more",), run=('["n", "y"]', '["n"]')),
    "a class twice": Case(("twice",), run=('["n", "y"]', '["n", "y", "n"]')),
    "weights for other classes": Case(("class_weights", "n = …, y = …"), settings=("options.class_weights={n = 1}",)),
    "an unknown target": Case(('options.target = "numbr"', "class, number"), settings=("options.target=numbr",)),
    "a number with classes": Case(('"number" has no classes',), settings=("options.target=number",)),
    "a label that is not there": Case(
        ("'il' is none of the 4", "correct the name"), run=('label = "ill"', 'label = "il"')
    ),
    "an ignored column that is not there": Case(("'id' is none of the 4",), settings=('options.ignore=["id"]',)),
    "a split by a column of other values": Case(
        ("record 1", "'smoker' is neither train nor test"), settings=("options.split=smoker", "options.categories=")
    ),
    "nothing held out": Case(("no test set", "split"), settings=("options.test_fraction=0",)),
    "a misspelt option": Case(('did you mean "label"?',), settings=("options.lable=ill",)),
    "an unknown encoding": Case(("cp99999",), settings=("options.encoding=cp99999",)),
    "a delimiter of two characters": Case(("one character",), settings=("options.delimiter=ab",)),
    "a file that is not there": Case(("cannot read", "u.csv"), settings=("options.path=u.csv",)),
    "a spreadsheet": Case((".xlsx", "convert it"), settings=("options.path=t.xlsx",)),
    "no path": Case(("needs options.path",), run=('path = "t.csv"', "")),
    "a number for a path": Case(("options.path = 7", "wrong type"), run=('path = "t.csv"', "path = 7")),
    # ---- the run
    "more learners than sites": Case(("2 sites", "set learners = 2", '"iid"'), settings=("learners=3",)),
    "a batch larger than a site": Case(("batch_size = 500", "lower it"), settings=("batch_size=500",)),
    "no delta": Case(("privacy.delta is missing",), settings=("privacy.delta=",)),
    "a large delta": Case(("delta = 0.5", "use"), settings=("privacy.delta=0.5",)),
    "no budget": Case(("privacy.epsilon or privacy.noise_multiplier",), settings=("privacy.epsilon=",)),
    "a negative budget": Case(("privacy.epsilon = -1",), settings=("privacy.epsilon=-1",)),
    "a misspelt key": Case(('did you mean "epsilon"?',), settings=("privacy.epsilom=3",)),
    "a misspelt table": Case(('did you mean "privacy"?',), run=("[privacy]", "[privcy]")),
    "a misspelt task": Case(('did you mean "table"?',), settings=("task=tabel/logistic",)),
    "a misspelt model": Case(("logistc", "logistic, mlp"), settings=("task=table/logistc",)),
    "no TOML": Case(("not valid TOML", "line"), run=("learners = 2", "learners: 2")),
    "a number in quotes": Case(('learners = "2"', "a whole number"), run=("learners = 2", 'learners = "2"')),
    "a setting without =": Case(('has no "="',), arguments="simulate run.toml --set learners"),
    "a configuration that is not there": Case(("cannot read", "nowhere.toml"), arguments="simulate nowhere.toml"),
    "a table instead of a configuration": Case(("t.csv is not valid TOML",), arguments="simulate t.csv"),
    "a folder that is no run": Case(("nowhere",), arguments="train --resume nowhere"),
    "a misspelt command": Case(("Did you mean 'simulate'?",), arguments="simulat run.toml"),
    "a misspelt option of a command": Case(("--learner", "--learners"), arguments="check run.toml --learner 4"),
    "numbers of learners that are words": Case(("4,16,64",), arguments="check run.toml --learners four"),
    "learners for sites": Case(("2 sites",), arguments="check run.toml --learners 4"),
    "a label for init that is not there": Case(
        ('did you mean "ill"?',), arguments="init t.csv --label il --out new.toml"
    ),
    # ---- code of the user's own
    "NaN in the inputs": own(
        "nan", "training record 17 (counted from 0): inputs at position 2 is NaN", "remove the record", mode="none"
    ),
    "an infinite target": own("infinite_target", "record 9 (counted from 0): targets at position 0", mode="none"),
    "a model without parameters": own("no_parameters", "no trainable parameter"),
    "a dataset without a length": own("no_length", "has no length"),
    "classes of pixels": own("pixels", "one loss per record", "mean(1)"),
    "batch normalization": own("batchnorm", "BatchNorm", "without_batchnorm"),
    "a model of another width": own("wrong_width", "model"),
    "an error in a task": own("shouting", "ValueError at own.py, line", "withheld"),
    "a function that returns nothing": own("nothing", "gave a NoneType", "must return adp2sgd.Task"),
    "a function that is not declared": own("undeclared", "-> Task:"),
    "a model instead of a function": own("instance", "model=lambda: …"),
    "fewer targets than inputs": own("unequal", "5 inputs but 4 targets"),
    "a function that is not there": own("other", "module own has no function other"),
    "a module that is not Python": Case(
        ("broken.py, line 2", "is not valid Python", "correct it"),
        settings=("task=broken:task", "options="),
        files={"broken.py": "import os\ndef task( -> Task:\n"},
    ),
    "a module that is not there": Case(("no module named absent",), settings=("task=absent:task", "options=")),
    "a task that a file alone names": Case(("--trust own:nan",), run=('"table/logistic"', '"own:nan"')),
}


def test_there_are_sixty_of_them() -> None:
    assert len(CASES) >= 60


@pytest.mark.parametrize("name", CASES)
def test_a_wrong_input_gets_one_line_with_the_right_advice(
    name: str, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "own", raising=False)
    files = {"t.csv": TABLE.replace(*case.table), "run.toml": RUN.replace(*case.run), "own.py": OWN, **case.files}
    for file, text in files.items():
        (tmp_path / file).write_text(text, encoding="latin-1")
    settings = [part for setting in case.settings for part in ("--set", setting)]
    code, out, complaint = command(*case.arguments.split(), *settings)
    lines = [line for line in complaint.splitlines() if not re.search("preparing|note: ", line)]
    assert code == 2, complaint
    assert len(lines) == 1, complaint
    assert lines[0].startswith("adp2sgd: error: ")
    for word in case.words:
        assert word in lines[0], lines[0]
    for secret in SECRETS:
        assert secret not in out + complaint
    assert not (tmp_path / "runs").exists()
