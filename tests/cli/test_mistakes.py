"""Mistakes that people make in a shell: each ends with exit code 2, the fact, the values and a way out."""

import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from funcpipe.cli import main
from funcpipe.core import MB, LayerProfile, Source, read_trace, write, write_trace
from funcpipe.platforms.catalog import load_spec
from tests.support.plans import chain_profile

MODEL, SAMPLE, DATA = "tests.e2e.small:model", "tests.e2e.small:sample", "tests.e2e.small:data"

USER_CODE = """
import torch
from torch import nn
def none(*_): return None
def three(): return 3
def fails(): raise RuntimeError("boom")
def needs(x): return x
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 3)
    def forward(self, x): return self.a(x)
net = Net()
some = [1, 2]
"""


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a profile, a plan, traces of both kinds, and modules of a user that cannot be used."""
    folder = tmp_path_factory.mktemp("documents")
    spec = load_spec("local")
    layers = tuple(
        LayerProfile(
            name=f"layer{i}",
            parameter_bytes=4_000_000,
            activation_bytes=3_000_000,
            forward_s=(0.02,) * len(spec.sizes),
            backward_s=(0.04,) * len(spec.sizes),
        )
        for i in range(3)
    )
    measured = chain_profile(layers, spec, sent_bytes=10**5, micro_batch=2, base_memory_bytes=100 * MB)
    write(measured, folder / "profile.json")
    (folder / "wrong_code.py").write_text(USER_CODE)
    (folder / "broken_code.py").write_text("def f(:\n")
    (folder / "leaving_code.py").write_text("import sys; sys.exit(3)\n")
    (folder / "failing_code.py").write_text("raise ValueError('at import')\n")
    (folder / "notes.txt").write_text("mine")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["optimize", "profile.json", "--global-batch", "8", "-q"]) == 0
        assert main(["simulate", "plan.json", "profile.json", "--trace", "predicted.json"]) == 0
        write_trace(replace(read_trace("predicted.json"), source=Source.EXECUTED), "observed.json")
    return folder


@pytest.fixture
def here(documents: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "ALIBABA_CLOUD_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(documents / "nowhere"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(documents)
    return documents


PROFILE = f"profile {MODEL} --sample {SAMPLE}"
OPTIMIZE = "optimize profile.json --global-batch 8"
SIMULATE = "simulate plan.json profile.json"
TRAIN = f"train {MODEL} --plan plan.json --data {DATA}"
VERIFY = f"verify {MODEL} --plan plan.json --data {DATA}"
P, T = "--set plan", "--set training"
NONE = "--storage file:///tmp/funcpipe-no-such-folder"
AWS = "deploy aws --region eu-central-1 --template-only t.yaml"
ALIYUN = "deploy aliyun --region ap-southeast-1 --sizes 1vCPU-2048MB --template-only t"
WHOLE, ABOVE, LEAST = "must be a whole number from", "must be above 0", "must be at least 0"

MISTAKES = {
    # verbs and names
    "nonsense": "invalid choice: 'nonsense'",
    "optimise profile.json": "invalid choice: 'optimise'; did you mean 'optimize'?",
    "run": "arguments are required: VERB",
    "run stat x": "invalid choice: 'stat'; did you mean 'status'?",
    f"{PROFILE} --micro-bach 3": "unrecognized arguments: --micro-bach; did you mean '--micro-batch'?",
    f"{PROFILE} --output": "Option '--output' requires an argument",
    f"{PROFILE} --output --json": "argument -o/--output: expected one argument",
    f"{PROFILE} more": "unexpected extra argument (more)",
    "": "the following arguments are required: VERB",
    "profile": "arguments are required: MODULE:FACTORY, --sample",
    f"profile {MODEL}": "required: --sample",
    f"profile {MODEL} --sample nothing": "--sample: 'nothing' must read MODULE:FACTORY",
    f"profile no_module_here:make --sample {SAMPLE}": "there is no module 'no_module_here' in",
    f"profile tests.e2e.small:nothing --sample {SAMPLE}": "has no 'nothing'",
    f"profile broken_code:f --sample {SAMPLE}": "it raised SyntaxError",
    f"profile leaving_code:f --sample {SAMPLE}": "it raised SystemExit: 3",
    f"profile failing_code:f --sample {SAMPLE}": "raised ValueError: at import",
    # factories
    f"profile wrong_code:none --sample {SAMPLE}": "must return the model, a torch.nn.Module, but it returned None",
    f"profile wrong_code:three --sample {SAMPLE}": "but it returned a int",
    f"profile wrong_code:fails --sample {SAMPLE}": "raised RuntimeError: boom",
    f"profile wrong_code:needs --sample {SAMPLE}": "missing 1 required positional argument",
    f"profile wrong_code:net --sample {SAMPLE}": "a module that is made already, but a function or class",
    f"profile wrong_code:some --sample {SAMPLE}": "is made already (a value of type list), but a function",
    "profile wrong_code:Net --sample wrong_code:none": "must return one micro-batch of inputs",
    "profile wrong_code:Net --sample wrong_code:fails": "raised RuntimeError: boom",
    f"train wrong_code:none --plan plan.json --data {DATA}": "but it returned None",
    # validation
    f"{TRAIN} --set training.patience=3": "needs a dataset to validate on",
    f"{TRAIN} --metric a=b:c --validation-data nothing": "--validation-data: 'nothing' must read MODULE:FACTORY",
    f"{TRAIN} --metric broken --validation-data {DATA}": "--metric",
    f"{TRAIN} --validation-data {DATA} --set training.monitor=accuracy": "monitor must be one of val_loss",
    f"{TRAIN} --validation-data {DATA} --set training.validate-steps=0": WHOLE,
    f"{TRAIN} --validation-data {DATA} {T}.validate-steps=1 {T}.validate-epochs=1": "exclude each other: keep one",
    f"{TRAIN} --validation-data {DATA} --set training.min-delta=-1": LEAST,
    f"{TRAIN} --validation-data {DATA} --set training.best=plan.json": "plan.json",
    f"evaluate {MODEL} --plan plan.json --data nothing": "--data: 'nothing' must read MODULE:FACTORY",
    f"evaluate {MODEL} --plan plan.json --data {DATA} --weights notes.txt": "notes.txt is no state_dict of the model",
    f"predict {MODEL} --plan plan.json --data {DATA} -o plan.json": "plan.json is read by this command",
    f"predict {MODEL} --plan plan.json --data {DATA} -o o.safetensors --max-usd 0": ABOVE,
    # ranges
    f"{PROFILE} --micro-batch -3": f"argument --micro-batch: {WHOLE} 1 to 1000000000, got '-3'",
    f"{PROFILE} --micro-batch 0": WHOLE,
    f"{PROFILE} --micro-batch 1.5": WHOLE,
    f"{PROFILE} --micro-batch x": WHOLE,
    f"{PROFILE} --micro-batch 99999999999999999999999": WHOLE,
    f"{PROFILE} --set model.repeats=-1": WHOLE,
    f"{PROFILE} --set model.layers=-2": WHOLE,
    f"{PROFILE} --on local --max-usd nan": ABOVE,
    f"{PROFILE} --on local --max-usd -1": ABOVE,
    "optimize profile.json --global-batch 0": WHOLE,
    "optimize profile.json --global-batch -8": WHOLE,
    "optimize profile.json --global-batch 1e3": WHOLE,
    "optimize profile.json --global-batch 1000000000000000000000": WHOLE,
    "optimize profile.json --global-batch 7": "the nearest that are: 6 and 8",
    "optimize profile.json --global-batch 1": "not a multiple of the profile's micro-batch 2; the least: 2",
    f"{OPTIMIZE} --time-value -1": LEAST,
    f"{OPTIMIZE} --time-value inf": LEAST,
    f"{OPTIMIZE} --deadline nan": ABOVE,
    f"{OPTIMIZE} --max-usd 0": ABOVE,
    f"{OPTIMIZE} --steps 0": WHOLE,
    f"{OPTIMIZE} --set plan.memory=-1": WHOLE,
    f"{OPTIMIZE} --max-memory 0": WHOLE,
    f"{OPTIMIZE} --max-functions -2": WHOLE,
    f"{OPTIMIZE} --set plan.time-limit=-1": ABOVE,
    f"{OPTIMIZE} --replicas 0": "replicas[0] must be a whole number of at least 1, got 0",
    f"{OPTIMIZE} --replicas ,": "whole numbers separated by commas",
    f"{OPTIMIZE} --replicas 3": "possible degrees: 1, 2, 4",
    f"{OPTIMIZE} --set plan.sync-every=0": "sync_every must be a whole number of at least 1, got 0",
    f"{OPTIMIZE} --set plan.sync-every=-4": "sync_every must be a whole number of at least 1, got -4",
    f"{OPTIMIZE} {P}.sync-every=1.5": "sync_every must be a whole number of at least 1, or one of end, auto, got '1.5'",
    f"{OPTIMIZE} --set plan.sync-every=never": "or one of end, auto, got 'never'",
    f"{OPTIMIZE} {P}.sync-every=auto": "sync_every_at_most must be given with sync_every='auto', and with that alone",
    f"{OPTIMIZE} {P}.sync-every=4 {P}.sync-every-at-most=8": "with sync_every='auto', and with that alone, got 8",
    f"{OPTIMIZE} --set plan.sync-every=auto --set plan.sync-every-at-most=0": WHOLE,
    f"{OPTIMIZE} {P}.sync-every=auto {P}.sync-every-at-most=8 --pareto": (
        "must be a number of steps, or end, for a Pareto"
    ),
    f"{OPTIMIZE} --set plan.outer-lr=0.7": "outer_lr must be 1 with sync_every=1",
    f"{OPTIMIZE} --set plan.outer-momentum=0.9": "outer_momentum must be 0 with sync_every=1",
    f"{OPTIMIZE} --set plan.sync-every=4 --set plan.outer-lr=0": ABOVE,
    f"{OPTIMIZE} --set plan.sync-delay=1": "sync_delay must be 0 with sync_every=1",
    f"{OPTIMIZE} {P}.sync-every=4 {P}.sync-delay=4": "sync_delay must be less than the steps between meetings, 4 / 1",
    f"{OPTIMIZE} --set plan.sync-fragments=2": "sync_fragments must be 1 with sync_every=1",
    f"{OPTIMIZE} {P}.sync-every=4 {P}.sync-fragments=5": "sync_fragments must be at most 4, the steps of a round",
    f"{OPTIMIZE} --set plan.sync-every=4 --set plan.outer-momentum=-1": LEAST,
    f"{OPTIMIZE} {P}.sync-every=4 {P}.coupled=cache": "sync_every must be 1 with a loss of whole global batches",
    f"{OPTIMIZE} --set plan.sync-every=4 --set plan.averaged=true": "sync_every must be 1 with an average",
    f"{OPTIMIZE} --set plan.sync-every=4 --set plan.wire=fp16": "wire_back must be fp32, bf16 or int8 with local steps",
    f"{OPTIMIZE} {P}.sync-every=4 {P}.shard-optimizer=true {P}.wire-sync=bf16": (
        "wire_sync must be fp32 with local steps and"
    ),
    f"{OPTIMIZE} --set plan.sync-every=4 --set plan.policy=hybridps": "sync_every must be 1 with the policy hybridps",
    f"{SIMULATE} --set simulation.compute-jitter=-1": LEAST,
    f"{SIMULATE} --set simulation.transfer-jitter=nan": LEAST,
    f"{SIMULATE} --set simulation.seed=-1": WHOLE,
    f"{TRAIN} --epochs 0": WHOLE,
    f"{TRAIN} --epochs -1": WHOLE,
    f"{TRAIN} --lr 0": ABOVE,
    f"{TRAIN} --lr nan": ABOVE,
    f"{TRAIN} --set training.clip-grad-norm=0": ABOVE,
    f"{TRAIN} --seed -1": WHOLE,
    f"{TRAIN} --set training.checkpoint=0": WHOLE,
    f"{TRAIN} --set training.failure-interval=0": ABOVE,
    f"{TRAIN} --max-usd 0": ABOVE,
    f"{TRAIN} --max-usd -5": ABOVE,
    f"{TRAIN} --deadline 0": ABOVE,
    f"{TRAIN} --set training.message-deadline=0": ABOVE,
    f"{VERIFY} --steps 0": WHOLE,
    f"{VERIFY} --tolerance -1": ABOVE,
    f"stop x {NONE} --wait -1": LEAST,
    "logs aws --minutes -5": ABOVE,
    # choices
    f"{OPTIMIZE} --set plan.wire=bf61": "must be one of 'fp32', 'bf16', 'fp16', 'int8'",
    f"{OPTIMIZE} --set plan.wire-sync=fp16": "must be one of 'fp32', 'bf16'",
    f"{OPTIMIZE} --numerics int4": "must be one of 'exact', 'bf16'",
    f"{OPTIMIZE} --set plan.schedule=1fib": "'1f1b'",
    f"{OPTIMIZE} --set plan.sync=x": "'three-phase'",
    f"{OPTIMIZE} --optimizer adamw": "'adam'",
    f"{OPTIMIZE} --set plan.solver=abacus": "solver must be one of auto, exact",
    f"{OPTIMIZE} --set plan.policy=gpip": "policy must be one of funcpipe",
    f"{OPTIMIZE} --platform mars": "platform must be one of",
    f"{OPTIMIZE} --set plan.cut=nowhere": "must name a layer of chain",
    f"{OPTIMIZE} --set plan.size=layer1": "plan.size takes LAYER=SIZE, got 'layer1'",
    f"{OPTIMIZE} --set plan.size=layer1=9MB": "must be one of 1024MB",
    f"{OPTIMIZE} --set plan.memory=5": "leaves no size of local",
    f"{OPTIMIZE} --replicas 2,x": "--replicas takes whole numbers separated by commas, got '2,x'",
    f"{OPTIMIZE} --max 3": "unrecognized arguments: --max",
    f"{TRAIN} --set training.on-oom=explode": "must be one of 'fail', 'grow'",
    "logs x --level loud": "must be one of 'debug'",
    "deploy mars": "must be one of 'aws', 'aliyun'",
    "platforms sho": "must be one of 'list', 'show', 'measure'",
    "platforms show mars": "platform must be one of",
    "completion tcsh": "must be one of 'bash', 'zsh', 'fish'",
    "platforms show": "name the platform to show",
    "platforms show local -o .": ". cannot be written: choose another place",
    # what does not go together
    f"{OPTIMIZE} --figure f.png": "--figure draws the plans that --pareto finds",
    f"{OPTIMIZE} --pareto --set plan.policy=pipedream": "--pareto searches by itself",
    f"{OPTIMIZE} --steps 5": "--steps is what --deadline or --max-usd are for",
    f"{OPTIMIZE} --max-usd 1 --deadline 1": "not allowed with argument",
    f"{OPTIMIZE} {P}.wire=fp16 {P}.shard-optimizer=true": "wire_back must be fp32, bf16 or int8 with shard_optimizer",
    f"{PROFILE} --max-usd 1": "say where they run: --on local",
    f"{PROFILE} --like local": "say where they run: --on local",
    f"{TRAIN} --set training.averaged-output=out.pt": "training.averaged-output is for averages, and none are kept",
    f"{TRAIN} --set training.ema=1.5": "decay must be between 0 and 1, got 1.5",
    f"{TRAIN} --from-start": "--from-start says how to resume a run",
    f"{TRAIN} --take-over": "--take-over says what to do",
    f"{TRAIN} --detach": "storage must be given",
    f"{TRAIN} --resume x": "resume needs the storage",
    "platforms list local": "did you mean: funcpipe platforms show local",
    "platforms show local -o x.json": "writes no file",
    "platforms measure": "say where to write the specification: -o FILE",
    f"{AWS} --sizes 2048MB --plan plan.json": "not allowed with argument",
    # documents
    "optimize plan.json --global-batch 8": "expected 'funcpipe.profile/1'; a profile is written by `funcpipe profile`",
    "optimize nowhere.json --global-batch 8": "there is no such file; a profile is written by `funcpipe profile`",
    "optimize notes.txt --global-batch 8": "notes.txt: not JSON",
    "optimize . --global-batch 8": "Is a directory",
    "explain profile.json profile.json": "a plan is written by `funcpipe optimize`",
    "simulate predicted.json profile.json": "expected 'funcpipe.plan/1'",
    f"train {MODEL} --plan profile.json --data {DATA}": "expected 'funcpipe.plan/1'",
    f"train {MODEL} --plan nowhere.json --data {DATA}": "there is no such file; a plan is written by",
    f"{OPTIMIZE} --platform plan.json": "expected 'funcpipe.platform/1'",
    "report observed.json observed.json --figure f.png": "show a run and its prediction: name one trace of each",
    "report plan.json predicted.json": "plans are compared with plans",
    "report plan.json nowhere.json": "nowhere.json: cannot be read",
    "report plan.json aws-lambda local -o r.html": "the platform is given twice: aws-lambda and local",
    "explain plan.json aws-lambda local": "local is a second platform",
    "explain plan.json nowhere.json": "platform must be one of",
    "report observed.json": "say what to make: -o report.html for a page",
    "report observed.json observed.json -o r.html": "is a second observed: a report is of one",
    "report notes.txt -o r.html": "notes.txt: cannot be read",
    "report observed.json -o observed.json": "is read by this command",
    "report observed.json -o r.html --figure f.png": "belong to the comparison in text",
    "report observed.json -o no/r.html": "there is no folder no",
    f"report x {NONE} -o r.html": "there is no run 'x'",
    "deploy aws --plan nowhere.json --region eu-central-1 --template-only t.yaml": "a plan is written by",
    # outputs
    f"{OPTIMIZE} -o profile.json": "profile.json is read by this command and would be lost",
    f"{OPTIMIZE} -o observed.json": "observed.json is there already, and is a trace of funcpipe: it is not replaced",
    f"{OPTIMIZE} -o notes.txt": "notes.txt is there already, and is no plan of funcpipe",
    f"{OPTIMIZE} -o no/plan.json": "there is no folder no",
    f"{OPTIMIZE} -o .": ". cannot be written",
    f"{OPTIMIZE} --pareto --figure f.xyz": "f.xyz cannot be drawn: its name must end with .png",
    f"{SIMULATE} --trace plan.json": "plan.json is read by this command",
    f"{TRAIN} --trace profile.json": "is a profile of funcpipe: it is not replaced",
    f"{TRAIN} -o same.json --trace same.json": "same.json is named twice as an output",
    "report observed.json predicted.json --perfetto observed.json": "is read by this command",
    "report observed.json predicted.json --figure f.xyz": "must end with .png",
    "report observed.json predicted.json --perfetto no/x": "there is no folder no",
    # storages that are measured
    "platforms measure local --storage file:///x": "it goes without a platform, --like and --max-usd",
    "platforms measure --set platform.streams=2": "name it: --storage URL",
    "platforms list --storage file:///x": "list measures nothing",
    "platforms measure --storage /x": "must be a URL, such as file:///x",
    # runs and where they lie
    f"{TRAIN} --storage oss://bucket/x": "must read oss://BUCKET/PREFIX?endpoint=oss-REGION.aliyuncs.com&region=REGION",
    f"{TRAIN} --storage /tmp/x": "must be a URL, such as file:///tmp/x or",
    f"{TRAIN} --storage s3://": "must read s3://BUCKET/PREFIX",
    f"{TRAIN} --storage file://x/y": "must read file:///FOLDER, with three slashes",
    f"{TRAIN} --storage redis://host/x": "must read redis://HOST:PORT/DATABASE, where DATABASE is a number",
    f"{TRAIN} --storage http://x": "must be a URL such as",
    f"{TRAIN} --storage s3://u:p@bucket/x": "must not hold credentials",
    f"{TRAIN} --run a/b": "run must be at most 63 small letters, digits and dashes, got 'a/b'",
    f"{TRAIN} --platform mars": "platform must be local, ray://…, or a deployment such as",
    f"{TRAIN} --platform modal": "can be planned for, but functions do not run on it yet, got 'modal'",
    f"{TRAIN} --platform aws-lambda": "the region is not known: give it in the URL",
    f"{TRAIN} --like mars": "platform must be one of",
    "status": "arguments are required: RUN, --storage",
    f"status x {NONE}": "there is no run 'x'",
    f"stop x {NONE}": "there is no run 'x'",
    f"clean x {NONE}": "there is no run 'x'",
    f"status --key x {NONE}": "there is no run 'x'",
    f"status ../x {NONE}": "small letters, digits and dashes",
    "status x --storage nowhere": "storage must be a URL, such as file:///",
    "logs x": "there are no logs of a run 'x' on this machine",
    "logs x --platform mars://x": "platform must be local, ray://…, or a deployment",
    "logs aws": "the region is not known",
    "deploy aws --sizes 2048MB": "the region is not known",
    f"{AWS} --sizes x": "a size on AWS is its memory, such as 2048MB",
    f"{AWS} --sizes '2 vCPU'": "a size on AWS is its memory, such as 2048MB, got '2 vCPU'",
    f"{AWS} --sizes 64MB": "memory must be 128 to 10240 MB on AWS Lambda, got 64",
    f"{AWS} --sizes 2048MB --name a_b": "name must be small letters, digits and dashes",
    f"{AWS}": "say which functions to make",
    "deploy aws --region eu-central-1 --sizes 2048MB --template-only no/t.json": "there is no folder no",
    ALIYUN: "say with --repository where the image goes",
    f"{ALIYUN} --repository registry-intl.cn-hangzhou.aliyuncs.com/you/it": (
        "must lie in ap-southeast-1, where the functions are, not in cn-hangzhou"
    ),
    f"{ALIYUN} --repository registry.test/you/it --set platform.base-image=python@latest": (
        "base image must be an image's name"
    ),
    "deploy aws --command x": "--command is for machines: funcpipe deploy sky",
    "destroy mars": "must be one of 'aws', 'aliyun', got 'mars'",
}


@pytest.mark.parametrize("command", MISTAKES)
def test_a_mistake_is_told_with_exit_code_2(command: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path.name: path.read_bytes() for path in here.iterdir() if path.is_file()}
    code = main(shlex.split(command))
    told = capsys.readouterr().err
    assert code == 2
    assert MISTAKES[command] in told
    assert "Traceback" not in told
    assert {path.name: path.read_bytes() for path in here.iterdir() if path.is_file()} == before


def test_an_output_replaces_one_of_its_own_kind(here: Path, tmp_path: Path) -> None:
    other = str(tmp_path / "plan.json")
    for _ in range(2):
        assert main([*OPTIMIZE.split(), "-q", "-o", other]) == 0
    Path(other).write_bytes(b"")
    assert main([*OPTIMIZE.split(), "-q", "-o", other]) == 0


def test_explain_needs_the_plan_alone(here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It judges by what the plan was made for and from: a plan that follows pins is the best of those that do."""
    path = tmp_path / "plan.json"
    asked = ["--time-value", "300", "--set", "plan.memory=2048", "--set", "plan.together=layer0,layer1"]
    assert main([*OPTIMIZE.split(), *asked, "-o", str(path), "-q"]) == 0

    def explained(*words: str) -> dict[str, Any]:
        capsys.readouterr()
        assert main(["explain", str(path), "--json", *words]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    made = explained()
    assert made["second"]["worse_by"] >= 0
    assert made == explained("profile.json")
    plan = json.loads(path.read_text())
    assert plan["request"]["pins"]["memory_mb"] == 2048
    plan["request"]["pins"]["memory_mb"] = None
    path.write_text(json.dumps(plan))
    assert explained()["second"]["worse_by"] < 0
    assert main(["explain", str(path)]) == 0
    assert "this plan is not the best; a better one: " in capsys.readouterr().out
    path.write_text(json.dumps({name: value for name, value in plan.items() if name != "request"}))
    assert main(["explain", str(path)]) == 2
    assert f"{path} does not say what it was chosen from" in capsys.readouterr().err
    assert explained("profile.json")["plan"]["estimate"] == made["plan"]["estimate"]


@pytest.mark.parametrize("verb", ["platforms", OPTIMIZE + " -o new.json", SIMULATE + " --gantt", "--help"])
def test_a_terminal_that_lacks_characters_is_no_error(verb: str, here: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1", "PYTHONPATH": str(Path(__file__).parents[2])}
    words = verb.replace("new.json", str(tmp_path / "new.json")).split()
    done = subprocess.run([sys.executable, "-m", "funcpipe", *words], env=environment, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout


def test_what_is_missing_is_told_and_runs_are_looked_after_without_loading_torch(here: Path) -> None:
    commands = [f"train {MODEL} --plan nowhere.json --data {DATA}", f"profile no_module_here:f --sample {SAMPLE}"]
    commands += [f"{verb} x {NONE}" for verb in ("status", "stop", "clean", "status --key")]
    code = "import sys; from funcpipe.cli import main\n" + "".join(
        f"print(main({command.split()!r}), 'torch' in sys.modules)\n" for command in commands
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert dict(zip(commands, done.stdout.splitlines(), strict=True)) == dict.fromkeys(commands, "2 False")
