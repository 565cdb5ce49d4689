"""Deploying and destroying: what there is afterwards, that both may be repeated, and what their errors say."""

import functools
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from funcpipe.errors import FuncPipeError, InvalidValue, PlatformError, PlatformRefused
from funcpipe.platforms.aws.account import Account, advice
from funcpipe.platforms.aws.deployment import Deployed, Deployer, lambda_package
from funcpipe.platforms.aws.template import Shape
from funcpipe.platforms.catalog import load_spec
from funcpipe.platforms.shared.cloud import SECRET
from funcpipe.platforms.shared.package import Docker, Package
from tests.cloud_emulation.aws import AwsCloud
from tests.examples import in_long_run
from tests.platforms.aws.conftest import reset

SHAPE = Shape(name="funcpipe", memory_mb=(1024, 2048))
NO_DOCKER = "a-docker-that-is-not-there"


@functools.cache
def small_package(extra: tuple[str, ...] = ()) -> Package:
    """The package of functions, but for most of its files: these deployments run none."""
    files = lambda_package(extra).files
    return Package(files={path: data for path, data in files.items() if path.count("/") < 2})


def deployer(account: Account, docker: str = NO_DOCKER) -> Deployer:
    return Deployer(account, sleep=lambda s: None, docker=Docker(docker))


def deploy(account: Account) -> Deployed:
    return deployer(account).deploy(SHAPE, small_package())


def inventory(cloud: AwsCloud) -> dict[str, list[str]]:
    """What is in the account, besides objects."""
    functions = cloud.client("lambda").list_functions()["Functions"]
    return {
        "functions": sorted(f"{f['FunctionName']} {f['MemorySize']} {f['Timeout']}" for f in functions),
        "buckets": [bucket["Name"] for bucket in cloud.client("s3").list_buckets()["Buckets"]],
        "repositories": [r["repositoryName"] for r in cloud.client("ecr").describe_repositories()["repositories"]],
        "logs": [group["logGroupName"] for group in cloud.client("logs").describe_log_groups()["logGroups"]],
        "roles": ["role" for _ in cloud.client("iam").list_roles()["Roles"]],
        "stacks": [s["StackName"] for s in cloud.client("cloudformation").describe_stacks()["Stacks"]],
    }


COMPLETE = {
    "functions": ["funcpipe-1024 1024 900", "funcpipe-2048 2048 900", "funcpipe-watchdog 256 240"],
    "buckets": ["funcpipe-123456789012-us-east-1"],
    "repositories": ["funcpipe"],
    "logs": ["/funcpipe/funcpipe"],
    "roles": ["role", "role", "role"],
    "stacks": ["funcpipe"],
}
NOTHING: dict[str, list[str]] = {name: [] for name in COMPLETE}


def test_deploying_again_changes_nothing_and_destroying_leaves_nothing(cloud: AwsCloud, account: Account) -> None:
    first = deploy(account)
    assert inventory(cloud) == COMPLETE
    changes = len(cloud.changes)
    assert changes == 4  # stack, archive, build, stack
    assert deploy(account) == first
    assert len(cloud.changes) == changes
    cloud.client("s3").put_object(Bucket=first.bucket, Key="runs/run-1/left", Body=b"1")
    deployer(account).destroy("funcpipe")
    assert inventory(cloud) == NOTHING
    deployer(account).destroy("funcpipe")


def test_other_sizes_and_another_package_change_only_that(cloud: AwsCloud, account: Account) -> None:
    deploy(account)
    changes = len(cloud.changes)
    deployer(account).deploy(Shape(name="funcpipe", memory_mb=(2048, 3008)), small_package())
    assert cloud.changes[changes:] == ["UpdateStack"]
    sizes = ["funcpipe-2048 2048 900", "funcpipe-3008 3008 900"]
    assert inventory(cloud)["functions"] == [*sizes, "funcpipe-watchdog 256 240"]
    other = small_package(("einops==0.8.1",))
    assert other.digest != small_package().digest
    found = deployer(account).deploy(Shape(name="funcpipe", memory_mb=(2048, 3008)), other)
    images = {f["FunctionName"]: f for f in cloud.client("lambda").list_functions()["Functions"]}
    assert found.image.endswith(other.digest)
    assert images.keys() == {"funcpipe-2048", "funcpipe-3008", "funcpipe-watchdog"}


def test_a_deployment_without_a_watchdog_has_neither_its_function_nor_its_role(
    cloud: AwsCloud, account: Account
) -> None:
    with_watchdog = deploy(account)
    without = deployer(account).deploy(Shape(name="funcpipe", memory_mb=(1024, 2048), watchdog=False), small_package())
    expected = {**COMPLETE, "functions": COMPLETE["functions"][:2], "roles": ["role", "role"]}
    assert inventory(cloud) == expected
    here, there = load_spec("aws-lambda"), load_spec("aws-lambda?region=sa-east-1")
    assert with_watchdog.keeping_usd_month(here) - without.keeping_usd_month(here) == pytest.approx(0.32, abs=0.005)
    assert "$0.32 of it for the watchdog, with an image" in with_watchdog.keeping_text(here)
    assert "$0.41 of it for the watchdog" in with_watchdog.keeping_text(there), "a listing costs 7 instead of 5 USD"
    assert "for objects of runs, at the prices of us-east-1, which" in with_watchdog.keeping_text(there)
    nowhere = load_spec("aws-lambda?region=mx-central-1")
    told = "; prices of mx-central-1 are not known; those of us-east-1 are used"
    assert with_watchdog.keeping_text(nowhere).endswith(told)


@pytest.mark.parametrize("effective", [True, *in_long_run([False])], ids=["answer lost", "refused"])
def test_a_deployment_that_fails_at_any_call_can_be_repeated(
    cloud: AwsCloud, account: Account, effective: bool
) -> None:
    deploy(account)
    for number in range(1, len(cloud.calls)):  # the first asks who we are, once
        reset(cloud.moto)
        failing(cloud, number, effective, lambda: deploy(account))
        deploy(account)
        assert inventory(cloud) == COMPLETE


@pytest.mark.parametrize("effective", [False, *in_long_run([True])], ids=["refused", "answer lost"])
def test_a_removal_that_fails_at_any_call_can_be_repeated(cloud: AwsCloud, account: Account, effective: bool) -> None:
    deploy(account)
    before = len(cloud.calls)
    deployer(account).destroy("funcpipe")
    for number in range(1, len(cloud.calls) - before + 1):
        deploy(account)
        failing(cloud, number, effective, lambda: deployer(account).destroy("funcpipe"))
        deployer(account).destroy("funcpipe")
        assert inventory(cloud) == NOTHING


def failing(cloud: AwsCloud, number: int, effective: bool, act: Callable[[], object]) -> None:
    """Do `act`, whose call of that number fails."""
    seen: list[str] = []

    def refuse(call: str) -> str | None:
        seen.append(call)
        return "AccessDenied" if len(seen) == number else None

    cloud.refuse, cloud.effective = refuse, effective
    with pytest.raises(FuncPipeError, match="AccessDenied"):
        act()
    assert len(seen) == number
    cloud.refuse, cloud.effective = lambda call: None, False


def test_an_account_that_cannot_build_is_refused_before_anything_is_made(cloud: AwsCloud, account: Account) -> None:
    cloud.limits.shown_builds = cloud.limits.builds = 0
    with pytest.raises(
        PlatformRefused,
        match=r"docker.* may run 0 builds.*'Concurrently running builds for Linux/Medium environment': .* L-2DC20C30 ",
    ):
        deploy(account)
    assert inventory(cloud) == NOTHING
    cloud.limits.shown_builds = None  # as where Service Quotas does not know
    with pytest.raises(PlatformRefused, match=r"Cannot have more than 0 builds in queue.*docker.*L-2DC20C30"):
        deploy(account)
    cloud.limits.builds = 1
    deploy(account)
    assert inventory(cloud) == COMPLETE


def test_a_new_account_is_told_what_it_may_not_before_anything_is_made(cloud: AwsCloud, account: Account) -> None:
    def said(memory_mb: tuple[int, ...]) -> list[str]:
        lines: list[str] = []
        made: list[int] = []

        def note(text: str) -> None:
            lines.append(text)
            made.append(len(cloud.changes))

        told = Deployer(
            account,
            say=note,
            sleep=lambda s: None,
            docker=Docker(NO_DOCKER),
        )
        told.deploy(Shape(name="funcpipe", memory_mb=memory_mb), small_package())
        return [text for text, changes in zip(lines, made, strict=True) if not changes]

    cloud.limits.concurrency = 10
    notices = "\n".join(said((1024, 4096)))
    assert "may run 10 functions at once in us-east-1" in notices
    assert "--service-code lambda --quota-code L-B99A9384 --desired-value 1000 --region us-east-1" in notices
    assert "those of 4096 MB fail" in notices
    deployer(account).destroy("funcpipe")
    cloud.calls.clear()
    assert "3008" not in "\n".join(said((1024, 3008)))
    deployer(account).destroy("funcpipe")
    cloud.calls.clear()
    cloud.limits.concurrency = 1000
    assert "Service Quotas" not in "\n".join(said((1024, 4096)))


def test_without_a_permission_the_error_names_the_action_and_the_way_out(cloud: AwsCloud, account: Account) -> None:
    cloud.refuse = lambda call: "AccessDenied" if call == "CreateStack" else None
    with pytest.raises(PlatformRefused, match=r"changing the stack funcpipe: AccessDenied: .*docs/aws\.md lists"):
        deploy(account)
    assert inventory(cloud) == NOTHING


def test_expired_credentials_are_told(cloud: AwsCloud, account: Account) -> None:
    cloud.refuse = lambda call: "ExpiredToken"
    with pytest.raises(PlatformRefused, match=r"asking whose credentials these are: ExpiredToken: .*log in again"):
        deploy(account)


def test_a_region_that_is_none_is_told_with_those_there_are() -> None:
    with pytest.raises(InvalidValue, match=r"region must be one of .*eu-central-1.*, got 'us-esat-1'"):
        Account(region="us-esat-1")


def test_no_credentials_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(PlatformRefused, match="there are no credentials for AWS; run `aws configure`"):
        _ = Account(region="us-east-1").number


@pytest.mark.parametrize(
    ("message", "way_out"),
    [
        ("'MemorySize' value failed to satisfy constraint: less than or equal to 3008", "--max-memory"),
        ("Image size 12 bytes exceeds the maximum image size", "10 GB unpacked"),
        ("Function not found: arn:aws:lambda:us-east-1:1:function:funcpipe-2048", "among --sizes"),
        ("The quota for functions is exceeded", "Service Quotas"),
        ("User: x is not authorized to perform: iam:CreateRole", "docs/aws.md"),
    ],
)
def test_messages_that_a_stack_fails_with_have_advice(message: str, way_out: str) -> None:
    assert way_out in str(advice(message))
    assert advice("something else") is None


DOCKER = """#!{python}
import json, os, subprocess, sys
arguments = sys.argv[1:]
with open(os.environ["DOCKER_LOG"], "a") as log:
    log.write(json.dumps(arguments) + "\\n")
if arguments[0] == "build":
    assert os.path.exists(os.path.join(arguments[-1], "Dockerfile"))
if arguments[0] == "image":
    print(os.environ["DOCKER_SIZE"])
if arguments[0] == "login":
    assert sys.stdin.read()
if arguments[0] == "push":
    sys.exit("no space left on device") if "DOCKER_FULL" in os.environ else None
"""


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A docker that notes its arguments."""
    program = tmp_path / "docker"
    program.write_text(DOCKER.format(python=sys.executable))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("DOCKER_LOG", str(tmp_path / "docker.log"))
    monkeypatch.setenv("DOCKER_SIZE", "1000")
    return str(program)


def test_docker_builds_where_it_runs(cloud: AwsCloud, account: Account, docker: str, tmp_path: Path) -> None:
    found = deployer(account, docker).deploy(SHAPE, small_package())
    commands = [line.split('"')[1] for line in (tmp_path / "docker.log").read_text().splitlines()]
    assert commands == ["version", "version", "build", "image", "login", "push"]
    assert f'"push", "{found.image}"' in (tmp_path / "docker.log").read_text()
    assert "StartBuild" not in cloud.calls


def test_an_image_that_is_too_large_is_not_pushed(
    cloud: AwsCloud, account: Account, docker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_SIZE", str(11 * 1024**3))
    with pytest.raises(PlatformRefused, match=r"the image has 11\.8 GB, functions admit 10\.7 GB unpacked"):
        deployer(account, docker).deploy(SHAPE, small_package())
    assert '"push"' not in (tmp_path / "docker.log").read_text()


def test_a_failure_of_docker_is_told_in_its_own_words(
    account: Account, docker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_FULL", "1")
    with pytest.raises(PlatformError, match=r"push .*` failed:\nno space left on device"):
        deployer(account, docker).deploy(SHAPE, small_package())


def test_a_build_that_fails_is_told_with_its_last_lines(
    cloud: AwsCloud, account: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    deploy(account)
    cloud.client("logs").create_log_stream(logGroupName="/funcpipe/funcpipe", logStreamName="build")
    lines = [{"timestamp": int(time.time() * 1000), "message": "funcpipe: image too large: 11811160064 bytes"}]
    cloud.client("logs").put_log_events(logGroupName="/funcpipe/funcpipe", logStreamName="build", logEvents=lines)
    failed = {"id": "funcpipe:1", "buildStatus": "FAILED", "logs": {"streamName": "build"}}
    monkeypatch.setattr(cloud, "start_build", lambda request: {"build": failed})
    with pytest.raises(PlatformRefused, match=r"(?s)has failed:.*image too large: 11811160064.*at most 10 GB"):
        deployer(account).deploy(SHAPE, small_package(("einops==0.8.1",)))


def secrets(cloud: AwsCloud) -> set[str]:
    """The secrets that functions have."""
    functions = cloud.client("lambda").list_functions()["Functions"]
    return {function["Environment"]["Variables"][SECRET] for function in functions}


def test_a_deployment_keeps_its_secret_and_shares_it_with_no_other(cloud: AwsCloud, account: Account) -> None:
    deploy(account)
    (secret,) = secrets(cloud)
    assert len(secret) == 64
    deployer(account).deploy(Shape(name="funcpipe", memory_mb=(2048, 3008)), small_package())
    assert secrets(cloud) == {secret}
    deployer(account).deploy(Shape(name="other", memory_mb=(1024,)), small_package())
    assert len(secrets(cloud)) == 2
    stacks = cloud.client("cloudformation").describe_stacks()["Stacks"]
    assert secret not in str([stack.get("Outputs") for stack in stacks])
    assert secret not in str(cloud.client("cloudformation").get_template(StackName="funcpipe")["TemplateBody"])
