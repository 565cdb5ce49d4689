"""Deploying to Function Compute and destroying: what there is afterwards, and that both may be repeated."""

import copy
import functools
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from funcpipe.core import PlatformSpec, WatchSpec, from_text
from funcpipe.errors import FuncPipeError, InvalidValue, PlatformRefused
from funcpipe.platforms.aliyun import template
from funcpipe.platforms.aliyun.account import Account
from funcpipe.platforms.aliyun.deployment import Deployer
from funcpipe.platforms.aliyun.template import Shape, container_package, shape_of, tool_template
from funcpipe.platforms.shared.cloud import SECRET
from funcpipe.platforms.shared.deployment import data_bucket
from funcpipe.platforms.shared.package import Docker
from tests.cloud_emulation.aliyun import AliyunCloud
from tests.contract.oss_server import OssServer
from tests.platforms.aliyun.conftest import size

package = functools.cache(container_package)
REPOSITORY = "registry.test/you/funcpipe"
ROLE = "funcpipe-functions-cn-test"
READS = ("Get", "List")


def shape(spec: PlatformSpec, *sizes: str) -> Shape:
    return shape_of(spec, name="funcpipe", sizes=sizes or ("0.5vCPU-1024MB", "1vCPU-2048MB"), repository=REPOSITORY)


def changes(cloud: AliyunCloud) -> list[str]:
    return [call for call in cloud.calls if not call.startswith(READS)]


def inventory(cloud: AliyunCloud, oss: OssServer) -> tuple[list[str], list[str], list[str], dict[str, list[str]]]:
    logs = {name: list(stores) for name, stores in cloud.logs.projects.items()}
    return sorted(cloud.functions), cloud.ram.inventory(), sorted(oss.buckets), logs


COMPLETE = (
    ["funcpipe-0_5vCPU-1024MB", "funcpipe-1vCPU-2048MB", "funcpipe-watchdog"],
    [f"Policy {ROLE}", f"Role {ROLE}", f"{ROLE} has {ROLE}"],
    ["funcpipe-1000-cn-test"],
    {"funcpipe-1000-cn-test": ["functions"]},
)
NOTHING: tuple[object, ...] = ([], [], [], {})


def test_deploying_again_changes_nothing_and_destroying_leaves_nothing(
    deployer: Deployer, cloud: AliyunCloud, oss: OssServer, spec: PlatformSpec
) -> None:
    first = deployer.deploy(shape(spec), package())
    assert inventory(cloud, oss) == COMPLETE
    done, lifecycle = len(changes(cloud)), dict(oss.buckets)
    assert done == 13  # log project, store and index, role, policy, attachment, three functions, their events, a timer
    assert deployer.deploy(shape(spec), package()) == first
    assert (len(changes(cloud)), oss.buckets) == (done, lifecycle)
    oss.objects["funcpipe-1000-cn-test/runs/run-1/left"] = b"1"
    deployer.destroy("funcpipe")
    assert (inventory(cloud, oss), oss.objects) == (NOTHING, {})
    deployer.destroy("funcpipe")


def test_other_sizes_and_images_change_only_that(deployer: Deployer, cloud: AliyunCloud, spec: PlatformSpec) -> None:
    deployer.deploy(shape(spec), package())
    done = len(changes(cloud))
    deployer.deploy(shape(spec, "1vCPU-2048MB", "1vCPU-1024MB"), package())
    made = ["CreateFunction", "CreatePolicyVersion", "DeleteFunction", "PutAsyncInvokeConfig"]
    assert sorted(changes(cloud)[done:]) == made  # rights name functions one by one
    assert sorted(cloud.functions) == ["funcpipe-1vCPU-1024MB", "funcpipe-1vCPU-2048MB", "funcpipe-watchdog"]
    done = len(changes(cloud))
    found = deployer.deploy(shape(spec, "1vCPU-2048MB", "1vCPU-1024MB"), container_package(("einops==0.8.1",)))
    assert changes(cloud)[done:] == 3 * ["UpdateFunction"]
    assert {f["customContainerConfig"]["image"] for f in cloud.functions.values()} == {found.image}


def test_a_deployment_without_a_watchdog_has_neither_its_function_nor_its_timer(
    deployer: Deployer, cloud: AliyunCloud, spec: PlatformSpec
) -> None:
    deployer.deploy(shape(spec), package())
    assert [name for name, _ in cloud.triggers] == ["funcpipe-watchdog"]
    deployer.deploy(replace(shape(spec), watchdog=False), package())
    assert cloud.triggers == {}
    assert sorted(cloud.functions) == COMPLETE[0][:2]


def test_a_deployment_or_removal_that_fails_at_any_call_can_be_repeated(
    deployer: Deployer, cloud: AliyunCloud, oss: OssServer, spec: PlatformSpec
) -> None:
    def deploy() -> None:
        deployer.deploy(shape(spec), package())

    def destroy() -> None:
        deployer.destroy("funcpipe")

    empty = state(cloud, oss)
    deploy()
    calls, complete = len(cloud.calls), state(cloud, oss)
    destroy()
    removal = len(cloud.calls) - calls
    for number in range(1, calls):  # the first asks who we are, once
        set_state(cloud, oss, empty)
        failing(cloud, number, deploy)
        deploy()
        assert inventory(cloud, oss) == COMPLETE
    for number in range(1, removal + 1):
        set_state(cloud, oss, complete)
        failing(cloud, number, destroy)
        destroy()
        assert inventory(cloud, oss) == NOTHING


def state(cloud: AliyunCloud, oss: OssServer) -> list[dict[str, object]]:
    """All that there is in the account, copied."""
    return copy.deepcopy([*kept(cloud, oss)])


def set_state(cloud: AliyunCloud, oss: OssServer, state: list[dict[str, object]]) -> None:
    for now, then in zip(kept(cloud, oss), state, strict=True):
        now.clear()
        now.update(copy.deepcopy(then))


def kept(cloud: AliyunCloud, oss: OssServer) -> list[dict[Any, Any]]:
    found: list[dict[Any, Any]] = [cloud.functions, cloud.configs, cloud.logs.projects, oss.buckets]
    ram = cloud.ram
    return [*found, cloud.triggers, oss.objects, ram.roles, ram.policies, ram.attached]


def failing(cloud: AliyunCloud, number: int, act: Callable[[], object]) -> None:
    """Do `act`, whose call of that number fails."""
    seen: list[str] = []

    def refuse(call: str) -> str | None:
        seen.append(call)
        return "NoPermission" if len(seen) == number else None

    cloud.refuse = refuse
    with pytest.raises(FuncPipeError, match="NoPermission"):
        act()
    assert len(seen) == number
    cloud.refuse = lambda call: None


def test_errors_say_what_to_do(
    deployer: Deployer, cloud: AliyunCloud, account: Account, spec: PlatformSpec, oss: OssServer
) -> None:
    cloud.refuse = lambda call: "NoPermission" if call == "CreateRole" else None
    with pytest.raises(PlatformRefused, match=r"CreateRole: NoPermission: .*docs/aliyun\.md lists"):
        deployer.deploy(shape(spec), package())
    cloud.refuse = lambda call: "QuotaExceeded" if call == "CreateFunction" else None
    with pytest.raises(PlatformRefused, match=r"making funcpipe-.*: QuotaExceeded: .*Quota Center"):
        deployer.deploy(shape(spec), package())
    cloud.refuse = lambda call: None
    without = Deployer(account, say=lambda text: None, docker=Docker("no-docker"), oss=oss.endpoint)
    with pytest.raises(
        PlatformRefused, match=r"no-docker does not run here; start it, .*`docker login registry\.test`"
    ):
        without.deploy(shape(spec), package())


@pytest.mark.parametrize(
    "registry",
    [
        "crpi-a1b2c3.cn-other.personal.cr.aliyuncs.com",
        "crpi-a1b2c3-vpc.cn-other.personal.cr.aliyuncs.com",
        "mine-registry.cn-other.cr.aliyuncs.com",
        "registry.cn-other.aliyuncs.com",
        "registry-intl.cn-other.aliyuncs.com",
    ],
)
def test_a_registry_of_another_region_is_refused_before_anything_is_made(
    registry: str, deployer: Deployer, cloud: AliyunCloud, oss: OssServer, spec: PlatformSpec
) -> None:
    wrong = replace(shape(spec), repository=f"{registry}/you/funcpipe", registry_instance="cri-abc")
    with pytest.raises(InvalidValue, match=r"must lie in cn-test, where the functions are, not in cn-other"):
        deployer.deploy(wrong, package())
    assert inventory(cloud, oss) == NOTHING


def test_an_image_of_the_enterprise_edition_names_its_instance(
    deployer: Deployer, cloud: AliyunCloud, oss: OssServer, spec: PlatformSpec
) -> None:
    """As Function Compute wants it (CustomContainerConfig.acrInstanceId)."""
    enterprise = replace(shape(spec), repository="mine-registry.cn-test.cr.aliyuncs.com/you/funcpipe")
    with pytest.raises(InvalidValue, match=r"Enterprise Edition.*--set platform.registry-instance=cri-"):
        deployer.deploy(enterprise, package())
    assert inventory(cloud, oss) == NOTHING
    deployer.deploy(replace(enterprise, registry_instance="cri-abc"), package())
    assert {f["customContainerConfig"]["acrInstanceId"] for f in cloud.functions.values()} == {"cri-abc"}
    assert {function["state"] for function in cloud.functions.values()} == {"Active"}
    personal = replace(shape(spec), repository="crpi-a1b2c3.cn-test.personal.cr.aliyuncs.com/you/funcpipe")
    deployer.deploy(personal, package())
    assert len(cloud.functions) == 3


def test_wrong_credentials_and_regions_are_told(cloud: AliyunCloud, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidValue, match=r"region must be one of .*cn-hangzhou.*, got 'cn-hangzou'"):
        Account(region="cn-hangzou")
    monkeypatch.setenv("OSS_ACCESS_KEY_SECRET", "wrong")
    with pytest.raises(PlatformRefused, match=r"SignatureDoesNotMatch: .*the credentials are not valid"):
        _ = Account(region="cn-test", endpoint=cloud.endpoint).number
    monkeypatch.delenv("OSS_ACCESS_KEY_ID")
    with pytest.raises(PlatformRefused, match="set OSS_ACCESS_KEY_ID and OSS_ACCESS_KEY_SECRET"):
        Account(region="cn-test", endpoint=cloud.endpoint)


@pytest.mark.parametrize(
    ("vcpu", "memory_mb", "rule"),
    [
        (1, 8192, "1 to 4 GB"),
        (16, 65_536, "32768 MB, the most of functions without a GPU"),
        (2, 1024, "1 to 4 GB"),
        (0.5, 1000, "steps of 64"),
        (0.33, 1024, "steps of 0.05"),
    ],
)
def test_sizes_that_the_service_has_not_are_refused(vcpu: float, memory_mb: int, rule: str) -> None:
    with pytest.raises(InvalidValue, match=rule):
        Shape(name="funcpipe", sizes=(size(vcpu, memory_mb),), repository=REPOSITORY)


def test_a_lifetime_that_tasks_have_not_is_refused(spec: PlatformSpec) -> None:
    assert replace(shape(spec), lifetime_s=86_400).lifetime_s == 86_400
    for lifetime_s in (0, 86_401):
        with pytest.raises(InvalidValue, match="tasks run 24 hours at most"):
            replace(shape(spec), lifetime_s=lifetime_s)


def test_the_tool_s_template_says_the_same_as_the_calls(
    deployer: Deployer, cloud: AliyunCloud, spec: PlatformSpec
) -> None:
    found = deployer.deploy(shape(spec), package())
    role = f"acs:ram::1000:role/{ROLE}"
    ((_, timer),) = [(name, trigger) for (name, _), trigger in cloud.triggers.items()]
    watch = watch_spec(timer["triggerConfig"])
    text = tool_template(shape(spec), region="cn-test", image=found.image, role=role, storage=watch.storage)
    value = json.loads(text)
    assert (value["edition"], value["resources"].keys()) == ("3.0.0", cloud.functions.keys())
    for name, resource in value["resources"].items():
        properties = dict(resource["props"])
        assert properties.pop("region") == "cn-test"
        assert properties.pop("asyncInvokeConfig") == cloud.configs[name]
        for trigger in properties.pop("triggers", []):
            told = trigger.pop("triggerConfig")
            assert watch_spec(json.dumps(told)) == replace(watch, platform="aliyun-fc://funcpipe?region=cn-test")
            assert told | {"payload": ""} == json.loads(timer["triggerConfig"]) | {"payload": ""}
            assert {**trigger, "triggerConfig": timer["triggerConfig"]} == timer
        assert properties.pop("logConfig") == "auto"  # the tool's own project
        expected = dict(cloud.functions[name])
        assert expected.pop("logConfig")["project"] == "funcpipe-1000-cn-test"
        assert properties.pop("environmentVariables") == {SECRET: "${env(FUNCPIPE_SECRET)}"}
        assert expected.pop("environmentVariables").keys() == {SECRET}
        assert {**properties, "state": "Active", "tags": []} == expected


def watch_spec(config: str) -> WatchSpec:
    """What a timer tells the watchdog."""
    return from_text(WatchSpec, json.loads(config)["payload"], source="the timer")


def secrets(cloud: AliyunCloud) -> set[str]:
    """The secrets that functions have."""
    return {function["environmentVariables"][SECRET] for function in cloud.functions.values()}


def test_a_deployment_keeps_its_secret_and_shares_it_with_no_other(
    deployer: Deployer, cloud: AliyunCloud, spec: PlatformSpec
) -> None:
    deployer.deploy(shape(spec), package())
    (secret,) = secrets(cloud)
    assert len(secret) == 64
    deployer.deploy(replace(shape(spec), sizes=(size(1, 1024),)), package())
    assert secrets(cloud) == {secret}
    deployer.deploy(replace(shape(spec), name="other"), package())
    assert len(secrets(cloud)) == 2


def test_the_role_may_pull_the_image_and_no_other(deployer: Deployer, cloud: AliyunCloud, spec: PlatformSpec) -> None:
    deployer.deploy(shape(spec), package())
    states = {(function["state"], function.get("stateReason")) for function in cloud.functions.values()}
    assert states == {("Active", None)}
    repositories = "acs:cr:cn-test:1000:repository"
    for repository, may in [("you/funcpipe", True), ("cri-1/you/funcpipe", True), ("you/other", False)]:
        assert cloud.ram.allows(ROLE, "cr:PullRepository", f"{repositories}/{repository}") is may


@pytest.mark.parametrize("state", ["Failed", "Inactive"])
def test_functions_that_cannot_be_invoked_are_deployed_again(
    deployer: Deployer, cloud: AliyunCloud, spec: PlatformSpec, state: str
) -> None:
    deployer.deploy(shape(spec), package())
    cloud.functions["funcpipe-1vCPU-2048MB"]["state"] = state
    done = len(changes(cloud))
    deployer.deploy(shape(spec), package())
    assert changes(cloud)[done:] == ["UpdateFunction"]
    assert cloud.functions["funcpipe-1vCPU-2048MB"]["state"] == "Active"


def test_functions_may_read_buckets_of_data_and_nothing_else(
    deployer: Deployer, cloud: AliyunCloud, spec: PlatformSpec
) -> None:
    data = (data_bucket("oss://images/train/"), data_bucket("texts"))
    deployer.deploy(replace(shape(spec), data=data), package())
    images, texts = "acs:oss:*:1000:images", "acs:oss:*:1000:texts"
    for action, resource, prefix, may in (
        ("oss:GetObject", f"{images}/train/a.mds", "", True),
        ("oss:GetObject", f"{texts}/a.parquet", "", True),
        ("oss:ListObjects", images, "train/", True),
        ("oss:ListObjects", texts, "", True),
        ("oss:GetObject", f"{images}/trained/a.mds", "", False),
        ("oss:ListObjects", images, "", False),
        ("oss:PutObject", f"{images}/train/a.mds", "", False),
        ("oss:DeleteObject", f"{texts}/a.parquet", "", False),
        ("oss:GetObject", "acs:oss:*:1000:others/a.mds", "", False),
    ):
        assert cloud.ram.allows(ROLE, action, resource, prefix) is may, (action, resource)


def test_rights_name_their_resources(spec: PlatformSpec) -> None:
    rights = json.loads(template.rights(shape(spec), "bucket", "cn-test", "1000"))
    for statement in rights["Statement"]:
        assert not any("*" in action for action in statement["Action"])
        if statement["Resource"] == ["*"]:
            assert statement["Action"] == ["cr:GetAuthorizationToken"]
        else:
            assert all("1000" in resource for resource in statement["Resource"])


def test_objects_expire_after_the_days_that_are_wanted_and_old_versions_after_one(
    deployer: Deployer, oss: OssServer, spec: PlatformSpec
) -> None:
    deployer.deploy(shape(spec), package())
    (rules,) = oss.buckets.values()
    assert b"<Prefix>runs/</Prefix><Status>Enabled</Status><Expiration><Days>7</Days></Expiration>" in rules
    assert b"<NoncurrentVersionExpiration><NoncurrentDays>1</NoncurrentDays></NoncurrentVersionExpiration>" in rules
    assert b"<AbortMultipartUpload><Days>1</Days></AbortMultipartUpload>" in rules
    found = deployer.deploy(replace(shape(spec), keep_days=30), package())
    (longer,) = oss.buckets.values()
    assert longer == rules.replace(b"<Days>7</Days>", b"<Days>30</Days>")
    assert "expire after 30 days" in found.keeping_text(spec)
