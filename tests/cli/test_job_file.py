"""The job file: its tables and keys, what wins, and what is refused; and that all verbs can do with it alone."""

from pathlib import Path

import pytest

from funcpipe.cli import job_file
from funcpipe.cli.commands import parse
from funcpipe.core import Numerics, Wire
from funcpipe.errors import InputError

JOB = """
[model]
factory = "digits:model"
sample = "digits:sample"
micro-batch = 16
block = ["encoder", "decoder"]
[data]
train = "digits:train_data"
validation = "digits:test_data"
[platform]
name = "local"
run-on = "aws-lambda://mine?region=eu-central-1"
storage = "s3://bucket/runs"
cloud = "aws"
region = "eu-central-1"
[plan]
global_batch = 64
replicas = [1, 2]
deadline = 2
shard-optimizer = true
wire-sync = "bf16"
[training]
run = "digits"
optimizer = "digits:optimizer"
epochs = 6
loss = "digits:loss"
metric = ["error=digits:error_rate"]
patience = 3
max-usd = 0.5
output = "model.safetensors"
"""


@pytest.fixture(autouse=True)
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path(job_file.NAME).write_text(JOB)
    return tmp_path / job_file.NAME


def options(*words: str) -> dict[str, object]:
    return vars(parse(words))


@pytest.mark.parametrize(
    ("verb", "expected"),
    [
        ("profile", {"model": "digits:model", "sample": "digits:sample", "micro_batch": 16, "platform": "local"}),
        ("profile", {"blocks": ("encoder", "decoder"), "output": "profile.json", "layers": 30}),
        ("optimize", {"profile": "profile.json", "global_batch": 64, "replicas": (1, 2), "output": "plan.json"}),
        ("optimize", {"deadline": 2.0, "shard_optimizer": True, "wire_sync": Wire.BF16, "numerics": Numerics.EXACT}),
        ("explain", {"plan": "plan.json", "sources": ()}),
        ("simulate", {"plan": "plan.json", "sources": ()}),
        ("fit", {"model": "digits:model", "data": "digits:train_data", "plan": "plan.json", "epochs": 6}),
        ("fit", {"global_batch": 64, "micro_batch": 16, "platform": "aws-lambda://mine?region=eu-central-1"}),
        ("train", {"model": "digits:model", "data": "digits:train_data", "plan": "plan.json", "epochs": 6}),
        ("train", {"optimizer": "digits:optimizer", "max_usd": 0.5, "deadline_s": None, "name": "digits"}),
        ("train", {"platform": "aws-lambda://mine?region=eu-central-1", "output": "model.safetensors", "spec": None}),
        ("verify", {"model": "digits:model", "data": "digits:train_data", "plan": "plan.json", "steps": 3}),
        ("train", {"validation_data": "digits:test_data", "metrics": ("error=digits:error_rate",), "patience": 3}),
        ("evaluate", {"model": "digits:model", "data": "digits:test_data", "plan": "plan.json", "loss": "digits:loss"}),
        ("evaluate", {"metrics": ("error=digits:error_rate",), "platform": "aws-lambda://mine?region=eu-central-1"}),
        ("status", {"name": "digits", "storage": "s3://bucket/runs"}),
        ("stop", {"name": "digits", "storage": "s3://bucket/runs", "wait": 60.0}),
        ("clean", {"name": "digits", "storage": "s3://bucket/runs"}),
        ("logs", {"about": "digits", "storage": "s3://bucket/runs", "platform": None}),
        ("deploy", {"cloud": "aws", "region": "eu-central-1", "plan": "plan.json", "sizes": None}),
        ("destroy", {"cloud": "aws", "region": "eu-central-1", "name": "funcpipe"}),
        ("platforms", {"action": "list"}),
    ],
)
def test_a_verb_needs_nothing_but_the_file(verb: str, expected: dict[str, object]) -> None:
    found = options(verb)
    assert {name: found[name] for name in expected} == expected


def test_the_command_line_wins() -> None:
    assert options("train", "other:model", "--epochs", "2", "--data", "d:d")["model"] == "other:model"
    assert options("train", "--epochs=2")["epochs"] == 2
    assert options("train", "--epo", "2")["epochs"] == 2
    assert options("profile", "--set", "model.block=head")["blocks"] == ("head",)
    found = options("optimize", "--max-usd", "3")
    assert (found["budget"], found["deadline"]) == (3.0, None)
    found = options("optimize", "--set", "platform.spec=mine.json")
    assert (found["spec"], found["platform"]) == ("mine.json", None)
    found = options("deploy", "--sizes", "2048MB")
    assert (found["sizes"], found["plan"]) == ("2048MB", None)
    assert options("logs", "other", "--platform", "aws-lambda://x")["storage"] is None


def test_what_is_true_or_false_is_said_so(job: Path) -> None:
    for word, kept in (("true", True), ("false", False)):
        job.write_text(f"[training]\nkeep-model = {word}\nmax-usd = 1")
        found = options("train", "m:f", "--plan", "plan.json", "--data", "m:d")
        assert (found["keep_model"], found["max_usd"]) == (kept, 1.0)


def test_another_file_can_be_named_and_none_is_needed(job: Path, tmp_path: Path) -> None:
    job.rename(tmp_path / "job.toml")
    assert options("train", "--job", "job.toml")["epochs"] == 6
    assert options("train", "--job=job.toml", "--epochs", "1")["epochs"] == 1
    with pytest.raises(InputError, match="arguments are required: MODULE:FACTORY, --plan, --data"):
        options("train")
    with pytest.raises(InputError, match=r"nowhere.toml: cannot be read"):
        options("train", "--job", "nowhere.toml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[trainig]", r"unknown table \[trainig\]; did you mean 'training'\?; there are model, data, platform"),
        ("[training]\nepoch = 3", r"unknown key 'epoch' in \[training\]; did you mean 'epochs'\?"),
        ("[plan]\nglobal-bach = 3", "did you mean 'global-batch'"),
        ("[plan]\nepochs = 3", r"unknown key 'epochs' in \[plan\]"),
        ("[training]\njson = true", "unknown key 'json'"),
        ("[training]\nepochs = 0", "training.epochs must be a whole number from 1 to 1000000000, got '0'"),
        ("[training]\nepochs = true", "training.epochs must be a string or a number, got True"),
        ("[training]\nlr = nan", "training.lr must be above 0, got 'nan'"),
        ("[plan]\nwire = 'bf61'", "plan.wire must be one of 'fp32', 'bf16', 'fp16', 'int8', got 'bf61'"),
        ("[plan]\nwire-sync = 'fp16'", "plan.wire-sync must be one of 'fp32', 'bf16', 'int8', got 'fp16'"),
        ("[plan]\nshard-optimizer = 1", "plan.shard-optimizer must be true or false, got 1"),
        ("[plan]\ndeadline = 1\nmax-usd = 1", "plan.deadline and plan.max-usd exclude each other: keep one"),
        ("plan = 3", r"plan must be a table, \[plan\], got 3"),
        ("[plan", "not TOML"),
    ],
)
def test_what_cannot_be_used_is_told_with_the_key(text: str, message: str, job: Path) -> None:
    job.write_text(text)
    with pytest.raises(InputError, match=message):
        options("optimize", "--global-batch", "8")
