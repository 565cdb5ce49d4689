"""Settings, which only the job file and `--set` give; and that all flags that texts name exist."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from funcpipe.cli import job_file
from funcpipe.cli.commands import Commands, parse
from funcpipe.cli.options import Argument, Setting, declared, flags
from funcpipe.cli.verbs import Verb
from funcpipe.errors import InputError
from tests.docs.pages import PAGES, ROOT

VERBS = Commands().verbs()
KEYS = {verb: {one.key_in(command) for one in declared(command)} - {""} for verb, command in VERBS.items()}
FLAGS = {verb: {name for one in flags(command) for name in one.opts} for verb, command in VERBS.items()}

SAMPLES = ("3", "0.5", "m:f", "bf16", "sums=x")
"""Values, of which each setting takes one at least, if it is no choice."""

LEARNING = (
    "block loss optimizer lr scheduler scheduler-interval clip-grad-norm clip-grad-value teacher precision on-nan "
)
LEARNING += "reduction coupled seed "
FAULTS = "checkpoint failure-interval on-oom on-drift message-deadline max-usd deadline yes "
WHERE = "platform like storage spec run "
TRAINING = (
    f"data epochs ema {LEARNING} {FAULTS} {WHERE} resume detach take-over from-start keep-model rehearsal dry-run "
)
TRAINING += (
    "validation-data validate-steps validate-epochs metric monitor monitor-mode patience min-delta best log trace "
)
TRAINING += "output averaged-output loss-output "
BEFORE = {
    "fit": f"{TRAINING} global-batch micro-batch time-value plan",
    "profile": "sample data micro-batch repeats layers block teacher precision platform spec on like max-usd output",
    "optimize": "time-value deadline max-usd steps optimizer wire wire-back wire-sync numerics recompute schedule sync "
    "sync-every sync-every-at-most sync-fragments sync-delay outer-lr outer-momentum shard-optimizer stores averaged "
    "coupled replicas global-batch cut together size memory max-memory max-functions platform spec solver time-limit "
    "simulate policy pareto figure what-if output",
    "train": f"{TRAINING} plan way market updates global-batch micro-batch",
    "simulate": "clip-grad-norm compute-jitter transfer-jitter seed cold straggler death trace gantt",
    "verify": f"{LEARNING} plan way data steps tolerance message-deadline",
    "report": "storage output figure perfetto",
    "history": "figure",
    "evaluate": f"{FAULTS} {WHERE} plan data weights block loss metric seed precision",
    "predict": f"{FAULTS} {WHERE} plan data weights block output seed precision",
    "sweep": f"{FAULTS} {WHERE} trials items data validation-data metric monitor monitor-mode epochs plan global-batch "
    "micro-batch seed sampler pruner resume take-over max-functions dry-run output page",
    "run status": "storage key",
    "run watch": "storage interval once",
    "run logs": "platform storage worker level name region minutes containing",
    "run stop": "storage wait",
    "run clean": "storage take-over",
    "run export": "storage step output",
    "platforms": "like max-usd output storage streams body-mb",
    "deploy": "name region plan sizes requirements base-image repository registry-instance data-bucket spec keep-days "
    "watchdog template-only print-deployer-policy account way market command",
    "destroy": "name region",
    "provision compare": "samples global-batch epochs target-loss loss-model deadline max-usd miss-chance optimizer "
    "platform spec market gpu-speed ways count-server figure",
    "provision fit-loss": "storage run batch workers convergence skip form target-loss output",
}
"""What could be said before there were settings, all of it by flags: by the names of today where they were renamed."""

FLAG, KEY = re.compile(r"(?<![\w-])--[a-z][a-z-]*"), re.compile(r"--set ([a-z]+\.[a-z-]+)")

OF_OTHERS = (
    *(
        "--address",
        "--build",
        "--disable-usage-stats",
        "--extra-index-url",
        "--format",
        "--head",
        "--include-dashboard",
    ),
    *("--index", "--output", "--password-stdin", "--port", "--provenance", "--requirement", "--resources", "--tag"),
    *(
        "--query-gpu",
        "--service-code",
        "--quota-code",
        "--desired-value",
        "--function-name",
        "--reserved-concurrent-executions",
    ),
    *("--username", "--no-cache-dir", "--no-install-recommends", "--no-deps", "--block", "--target", "--strict"),
    *("--time", "--version", "--x-s"),
)
"""Flags of docker, pip, Ray, the clouds' own tools and the like, which texts name too."""


def words_for(verb: Verb) -> list[str]:
    """What a verb needs at least, as on a command line."""
    found = []
    for one in declared(verb):
        if one.required:
            value = getattr(one.type, "choices", ["m:f"])[0] if "{" in str(one.metavar) else "m:f"
            value = "3" if one.metavar == "N" else value
            found += [str(value)] if isinstance(one, Argument) else [one.opts[-1], str(value)]
    return found


def sample_of(one: Setting) -> str:
    """A value that a setting takes, and that is not its default."""
    choices = getattr(one.type, "choices", ("true", "false") if one.type is click.BOOL else SAMPLES)
    for text in reversed(choices) if choices is not SAMPLES else choices:
        try:
            value = one.type.convert(text, None, None)
        except (click.BadParameter, InputError):
            continue
        if value != one.default and text != one.default:
            return str(text)
    raise AssertionError(f"{one.key}: none of {choices}")


@pytest.mark.parametrize("verb", VERBS)
def test_what_is_no_flag_can_be_set_in_a_command_and_in_the_job_file(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    needed, command = [*verb.split(), *words_for(VERBS[verb])], VERBS[verb]
    before = vars(parse(needed))
    chosen: dict[str, tuple[Setting, str]] = {}
    for one in command.settings:  # of those that exclude each other, one
        chosen.setdefault(one.one_of or str(one.key), (one, sample_of(one)))
    words = [word for one, text in chosen.values() for word in ("--set", f"{one.key}={text}")]
    said = vars(parse([*needed, *words]))
    assert {name for name in said if said[name] != before[name]} - {"given"} == {one.name for one, _ in chosen.values()}
    tables: dict[str, list[str]] = {}
    for one, text in chosen.values():
        table, _, leaf = str(one.key).partition(".")
        tables.setdefault(table, []).append(f"{leaf} = {text if one.type is click.BOOL else repr(text)}")
    Path(job_file.NAME).write_text("\n".join("\n".join([f"[{name}]", *lines]) for name, lines in tables.items()))
    found = vars(parse(needed))
    assert all(found[str(one.name)] == said[str(one.name)] for one, _ in chosen.values())


def test_nothing_that_could_be_said_has_become_impossible() -> None:
    gone = {}
    for verb, names in BEFORE.items():
        leaves = {one.opts[-1] for one in VERBS[verb].settings} | FLAGS[verb]
        gone[verb] = [name for name in names.split() if f"--{name}" not in leaves]
    assert {verb: names for verb, names in gone.items() if names} == {}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("explain plan.json other.json aws-lambda", {"sources": ("other.json", "aws-lambda")}),
        ("simulate plan.json other.json", {"plan": "plan.json", "sources": ("other.json",)}),
        (
            "report observed.json predicted.json aws-lambda",
            {"files": ("observed.json", "predicted.json", "aws-lambda")},
        ),
        ("optimize p.json --global-batch 8 --max-usd 3 --steps 9", {"budget": 3.0, "iterations": 9}),
        ("optimize p.json --global-batch 8 --platform mine.json", {"platform": "mine.json"}),
        ("provision compare p.json --samples 9 --global-batch 8 --max-usd 3", {"budget_usd": 3.0}),
        ("deploy sky --plan ways.json --command run", {"plan": "ways.json", "on_head": "run"}),
        ("train m:f --data m:d --plan ways.json --optimizer adam --run r", {"optimizer": "adam", "name": "r"}),
    ],
)
def test_what_has_another_name_now(words: str, expected: dict[str, object]) -> None:
    found = vars(parse(words.split()))
    assert {name: found[name] for name in expected} == expected


def test_every_verb_has_a_key_once_and_tables_are_known() -> None:
    for verb, command in VERBS.items():
        keys = [key for one in declared(command) if (key := one.key_in(command))]
        assert len(set(keys)) == len(keys), verb
        assert {key.partition(".")[0] for key in keys} <= {*job_file.TABLES}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--set training.emma=1", r"--set training.emma: there is no such setting; did you mean 'training.ema'\?"),
        ("--set ema=1", r"--set ema: there is no such setting; did you mean 'training.ema'\?"),
        ("--set plan.wire=bf16", "--set plan.wire: funcpipe train has no such setting, only optimize"),
        ("--set training.ema", "--set takes KEY=VALUE, such as --set training.patience=3, got 'training.ema'"),
        ("--set training.ema=x", "--set training.ema must be above 0, got 'x'"),
        ("--set training.on-oom=explode", "--set training.on-oom must be one of 'fail', 'grow', got 'explode'"),
        ("--set training.keep-model=no", "--set training.keep-model must be true or false, got 'no'"),
        ("--epochs 2 --set training.epochs=3", "argument --epochs: not allowed with --set training.epochs"),
        (
            "--set training.validate-steps=1 --set training.validate-epochs=1",
            "--set training.validate-steps and --set training.validate-epochs exclude each other: keep one",
        ),
        ("--ema 0.9", "unrecognized arguments: --ema; it is a setting: --set training.ema=DECAY"),
    ],
)
def test_what_cannot_be_set_is_told(words: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse(["train", "m:f", "--plan", "p", "--data", "m:d", *words.split()])


def test_a_setting_beats_the_job_file_and_the_last_beats_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(job_file.NAME).write_text("[training]\nvalidate-epochs = 2\nema = 0.5\n[model]\nblock = 'a'\n")
    words = ["train", "m:f", "--plan", "p", "--data", "m:d"]
    found = parse(
        [*words, "--set", "training.validate_steps=3", "--set", "training.ema=0.8", "--set", "training.ema=0.9"]
    )
    assert (found.every_steps, found.every_epochs, found.ema, found.blocks) == (3, None, 0.9, ("a",))
    found = parse([*words, "--set", "model.block=b", "--set", "model.block=c", "--job", job_file.NAME])
    assert found.blocks == ("b", "c")
    assert found.given.count("blocks") == 1


def texts() -> Iterator[tuple[str, str]]:
    """All texts of the package's files that name a flag, and all pages, with where they are."""
    sources = {path: path.read_text() for path in (ROOT / "funcpipe").rglob("*.py")}
    for path, source in sources.items():
        for node in ast.walk(ast.parse(source)) if "--" in source else ():
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
                yield str(path.relative_to(ROOT)), "".join(map(str, parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield str(path.relative_to(ROOT)), node.value
    for page in (*PAGES, "CHANGELOG.md"):
        yield page, (ROOT / page).read_text().replace("\\\n", " ")


def unknown_in(text: str) -> Iterator[str]:
    """The flags and settings that a text names and that there are not, for the verb that it names them with."""
    text = re.sub(r"python -m\s+experiments[^`#]*", "", text)
    for path, rest in re.findall(r"\bfuncpipe ((?:run |provision )?[a-z][a-z-]*)([^`\n;]*)", text):
        if path in VERBS:
            words = re.split(r"[:,)] | && | shows ", re.sub(r"'[^']*'", "…", rest))[0]
            yield from (f"{path} {name}" for name in FLAG.findall(words) if name not in FLAGS[path])
            yield from (f"{path} {key}" for key in KEY.findall(words) if key not in KEYS[path])
    everywhere, keys = set().union(*FLAGS.values(), OF_OTHERS), set().union(*KEYS.values())
    yield from (name for name in FLAG.findall(text) if name not in everywhere)
    yield from (key for key in KEY.findall(text) if key not in keys)


def test_flags_and_settings_that_texts_name_exist() -> None:
    found = {(where, name) for where, text in texts() if "--" in text for name in unknown_in(text)}
    assert sorted(found) == []
