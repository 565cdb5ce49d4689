"""deploy, destroy and logs in a shell, against emulated accounts."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from funcpipe.cli import main
from funcpipe.core import write
from funcpipe.core.provision import CostItem, JobSpec, Provision, ProvisionTable, Rented
from funcpipe.platforms.aws.template import Shape, template
from tests.e2e import small


def test_a_template_is_written_without_an_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    write(small.plan(), tmp_path / "plan.json")
    assert main(["deploy", "aws", "--plan", "plan.json", "--template-only", "template.json"]) == 0
    assert json.loads(Path("template.json").read_text()) == template(Shape(name="funcpipe", memory_mb=(1024,)))


def test_a_plan_for_arm_functions_is_not_deployed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write(replace(small.plan(), platform="aws-lambda-arm"), tmp_path / "plan.json")
    assert main(["deploy", "aws", "--plan", "plan.json", "--template-only", "template.json"]) == 2
    assert "plan again with --platform aws-lambda" in capsys.readouterr().err
    assert not Path("template.json").exists()


def test_a_deployment_s_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.cloud_emulation.aws import aws_cloud

    monkeypatch.setenv("PATH", str(tmp_path))  # no docker
    with aws_cloud(tmp_path / "images") as cloud:
        for name, value in (("ACCESS_KEY_ID", "test"), ("SECRET_ACCESS_KEY", "test"), ("ENDPOINT_URL", cloud.endpoint)):
            monkeypatch.setenv(f"AWS_{name}", value)
        monkeypatch.setattr("time.sleep", lambda s: None)
        assert main(["deploy", "aws", "--region", "us-east-1", "--sizes", "2048MB", "--json"]) == 0
        shown = capsys.readouterr()
        assert json.loads(shown.out)["bucket"] == "funcpipe-123456789012-us-east-1"
        assert "keeping it costs $" in json.loads(shown.out)["keeping"]
        assert "making functions of 2048 MB" in shown.err
        assert main(["logs", "aws", "--region", "us-east-1"]) == 0
        assert main(["destroy", "aws", "--region", "us-east-1"]) == 0
        assert cloud.client("cloudformation").describe_stacks()["Stacks"] == []
        assert main(["logs", "aws", "--region", "us-east-1"]) == 1
        assert "reading the logs of funcpipe: ResourceNotFoundException" in capsys.readouterr().err


def ways(tmp_path: Path) -> str:
    """A table of two ways: functions, which are recommended, and machines."""

    def provision(way: str, name: str) -> Provision:
        return Provision(
            way=way,
            rented=(Rented(name=name, count=2),),
            seconds=60.0,
            iterations=10.0,
            cost=(CostItem(name=name, usd=1.0),),
            binds="deadline",
            why="it is a test",
        )

    table = ProvisionTable(
        job=JobSpec(samples=64, global_batch=8, epochs=1),
        model="small",
        platform="aws-lambda",
        market="aws",
        provisions=(provision("funcpipe", "2048MB aws-lambda"), provision("one-machine", "c7i.4xlarge")),
        refusals=(),
        recommended="funcpipe",
        why="it is the cheapest",
    )
    write(table, tmp_path / "ways.json")
    write(table.provisions[1], tmp_path / "way.json")
    return str(tmp_path / "ways.json")


@pytest.mark.parametrize("words", [["ways.json", "--set", "plan.way=one-machine"], ["way.json"]])
def test_machines_of_a_provision_get_a_task_file(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a job file names a plan, which is for functions."""
    ways(tmp_path)
    monkeypatch.chdir(tmp_path)
    Path("funcpipe.toml").write_text('[plan]\nfile = "plan.json"')
    deploy = ["deploy", "sky", "--plan", *words, "--command", "funcpipe train job", "--region", "eu-central-1"]
    assert main([*deploy, "--template-only", "sky.yaml"]) == 0
    text = Path("sky.yaml").read_text()
    for line in ("num_nodes: 2", '  instance_type: "c7i.4xlarge"', '  region: "eu-central-1"', "  funcpipe train job"):
        assert line in text.splitlines()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "deploy sky writes a task file: say which machines with --plan"),
        (["--plan", "{}", "--command", "x"], "the way funcpipe rents 2 x 2048MB aws-lambda, which is no machine"),
        (["--plan", "{}", "--command", "x", "--set", "plan.way=y"], "plan.way must be one of funcpipe, one-machine"),
        (["--plan", "/nowhere", "--command", "x"], "/nowhere: cannot be read"),
        (["--command", "x", "--sizes", "1MB"], "--sizes is for functions of a cloud"),
    ],
)
def test_what_is_no_task_file_is_told(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named = [word.format(ways(tmp_path)) for word in words]
    assert main(["deploy", "sky", *named, "--template-only", str(tmp_path / "sky.yaml")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "sky.yaml").exists()
