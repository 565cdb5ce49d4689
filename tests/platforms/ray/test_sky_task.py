import subprocess
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
import yaml

from funcpipe.core.provision import CostItem, Provision, Rented
from funcpipe.errors import InvalidValue, PlatformRefused
from funcpipe.platforms.catalog import load_market
from funcpipe.platforms.ray.sky_task import SkyJob, sky_documents, sky_text
from tests.platforms.ray import sky_schemas

JOB = SkyJob(command="funcpipe train --platform ray://auto", requirements=("timm==1.0", "my pkg"))
SERVER = Rented(name="c7i.4xlarge", count=1, role="parameter server")


def provision(*rented: Rented) -> Provision:
    return Provision(
        way="cynthia",
        rented=rented,
        seconds=60.0,
        iterations=10.0,
        cost=(CostItem(name="machines", usd=1.0),),
        binds="deadline",
        why="it is a test",
    )


def documents(*rented: Rented) -> list[dict[str, Any]]:
    """As they are read back from the file."""
    found = list(yaml.safe_load_all(sky_text(provision(*rented), load_market("aws"), JOB)))
    assert found == sky_documents(provision(*rented), load_market("aws"), JOB)
    return found


def test_machines_of_one_type_are_one_task() -> None:
    (task,) = documents(Rented(name="c7i.4xlarge", count=3), SERVER)
    assert task["num_nodes"] == 4
    assert task["resources"] == {
        "cloud": "aws",
        "region": "us-east-1",
        "instance_type": "c7i.4xlarge",
        "use_spot": False,
    }
    assert "pip install 'funcpipe-torch[ray,aws]' timm==1.0 'my pkg'" in task["setup"]
    assert JOB.command in task["run"]
    assert "< 4)" in task["run"]


def test_several_types_are_a_job_group_and_the_node_that_stays_is_its_head() -> None:
    header, head, *workers = documents(
        Rented(name="g5.xlarge", count=2, spot=True), Rented(name="c7i.2xlarge", count=3, spot=True), SERVER
    )
    assert header == {"name": "funcpipe", "execution": "parallel", "primary_tasks": ["head"]}
    assert (head["name"], head["num_nodes"], head["resources"]["use_spot"]) == ("head", 1, False)
    assert [(task["name"], task["num_nodes"], task["resources"]["instance_type"]) for task in workers] == [
        ("workers-1", 2, "g5.xlarge"),
        ("workers-2", 3, "c7i.2xlarge"),
    ]
    assert all(task["resources"]["use_spot"] for task in workers)
    assert JOB.command in head["run"]
    assert "< 6)" in head["run"]
    assert not [task for task in workers if JOB.command in task["run"]]
    assert all("head-0.$SKYPILOT_JOBGROUP_NAME" in task["run"] for task in (head, *workers))


@pytest.mark.parametrize("kinds", [[SERVER], [SERVER, Rented(name="g5.xlarge", count=2, spot=True)]])
def test_the_scripts_are_scripts(kinds: list[Rented]) -> None:
    for task in documents(*kinds):
        for script in (task.get("setup", ""), task.get("run", "")):
            subprocess.run(["bash", "-n"], input=script, text=True, check=True)


@pytest.mark.parametrize(
    "kinds",
    [
        [Rented(name="c7i.4xlarge", count=3), SERVER],
        [Rented(name="g5.xlarge", count=2, spot=True), Rented(name="c7i.2xlarge", count=3, spot=True), SERVER],
    ],
)
def test_it_is_what_skypilot_s_own_schemas_admit(kinds: list[Rented]) -> None:
    schemas = sky_schemas.load()
    for document in documents(*kinds):
        if "execution" not in document:
            jsonschema.validate(document, schemas.get_task_schema())
            jsonschema.validate(document["resources"], schemas.get_resources_schema())
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"nodes": 3}, schemas.get_task_schema())
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"machine": "x"}, schemas.get_resources_schema())


def test_what_skypilot_cannot_rent_is_refused() -> None:
    with pytest.raises(PlatformRefused, match="the way cynthia rents 4 x 2048MB aws-lambda, which is no machine"):
        documents(Rented(name="2048MB aws-lambda", count=4), SERVER)
    with pytest.raises(PlatformRefused, match="SkyPilot cannot rent the machines of the market aliyun"):
        sky_documents(provision(SERVER), replace(load_market("aws"), name="aliyun"), JOB)


@pytest.mark.parametrize(("name", "command"), [("a", " "), ("a b", "x"), ("", "x")])
def test_a_job_has_a_name_and_a_command(name: str, command: str) -> None:
    with pytest.raises(InvalidValue, match="must"):
        SkyJob(name=name, command=command)
