"""The template says what a deployment is: valid, least rights, limits that are ours to enforce."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from funcpipe.core import WatchSpec, from_text
from funcpipe.errors import InvalidValue
from funcpipe.platforms.aws.template import Shape, template, template_text
from funcpipe.platforms.shared.deployment import data_bucket

DATA = (data_bucket("s3://images/train/"), data_bucket("texts"))
SHAPE = Shape(name="funcpipe", memory_mb=(1024, 10240), data=DATA)


def resources(kind: str) -> list[dict[str, Any]]:
    return [r["Properties"] for r in template(SHAPE)["Resources"].values() if r["Type"] == kind]


def test_the_template_passes_cfn_lint(tmp_path: Path) -> None:
    (tmp_path / "template.json").write_text(template_text(SHAPE))
    program = Path(sys.executable).with_name("cfn-lint")
    command = [
        str(program),
        "--regions",
        "us-east-1",
        "cn-north-1",
        "us-gov-west-1",
        "--template",
        str(tmp_path / "template.json"),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    broken = json.loads(template_text(SHAPE))
    broken["Resources"]["Function1024"]["Properties"]["PackageType"] = "Picture"
    (tmp_path / "template.json").write_text(json.dumps(broken))
    assert subprocess.run(command, capture_output=True).returncode != 0


def test_rights_name_their_resources() -> None:
    for role in resources("AWS::IAM::Role"):
        for policy in role["Policies"]:
            for statement in policy["PolicyDocument"]["Statement"]:
                assert not any("*" in action for action in statement["Action"])
                if statement["Resource"] == "*":
                    assert statement["Action"] == ["ecr:GetAuthorizationToken"]
                else:
                    assert "*" not in json.dumps(statement["Resource"]).replace('/*"', "").replace("funcpipe-*", "")


def test_functions_that_train_may_read_buckets_of_data_and_nothing_else() -> None:
    plain = template(Shape(name="funcpipe", memory_mb=(1024, 10240)))["Resources"]
    for name, found in template(SHAPE)["Resources"].items():
        if name != "FunctionRole":
            assert found == plain[name]
    before, after = (
        [json.dumps(statement) for statement in role["Properties"]["Policies"][0]["PolicyDocument"]["Statement"]]
        for role in (plain["FunctionRole"], template(SHAPE)["Resources"]["FunctionRole"])
    )
    assert after[: len(before)] == before
    arn = "arn:${AWS::Partition}:s3:::"
    assert [json.loads(statement) for statement in after[len(before) :]] == [
        {"Effect": "Allow", "Action": ["s3:GetObject"], "Resource": {"Fn::Sub": f"{arn}images/train/*"}},
        {
            "Effect": "Allow",
            "Action": ["s3:ListBucket"],
            "Resource": {"Fn::Sub": f"{arn}images"},
            "Condition": {"StringLike": {"s3:prefix": ["train/*"]}},
        },
        {"Effect": "Allow", "Action": ["s3:GetObject"], "Resource": {"Fn::Sub": f"{arn}texts/*"}},
        {
            "Effect": "Allow",
            "Action": ["s3:ListBucket"],
            "Resource": {"Fn::Sub": f"{arn}texts"},
            "Condition": {"StringLike": {"s3:prefix": ["*"]}},
        },
    ]


@pytest.mark.parametrize(
    "text", ["", "Images", "a*", "images/*", "images/${aws:username}", "images/a?b", "images\u00e9"]
)
def test_buckets_of_data_are_named_without_wildcards(text: str) -> None:
    with pytest.raises(InvalidValue, match=r"must be a bucket's name, with or without|must be letters, digits"):
        data_bucket(text)


def test_builds_may_do_all_that_a_push_does() -> None:
    statements = template(SHAPE)["Resources"]["BuildRole"]["Properties"]["Policies"][0]["PolicyDocument"]["Statement"]
    (pushing,) = [s["Action"] for s in statements if s["Resource"] == {"Fn::GetAtt": ["Repository", "Arn"]}]
    layers = ("BatchCheckLayerAvailability", "InitiateLayerUpload", "UploadLayerPart", "CompleteLayerUpload")
    assert set(pushing) == {f"ecr:{action}" for action in (*layers, "PutImage", "BatchGetImage")}


def test_there_are_no_retries_and_failures_are_recorded() -> None:
    invocations = resources("AWS::Lambda::EventInvokeConfig")
    assert len(invocations) == len(resources("AWS::Lambda::Function")) == 3
    for invocation in invocations:
        assert invocation["MaximumRetryAttempts"] == 0
        assert invocation["DestinationConfig"] == {"OnFailure": {"Destination": {"Fn::GetAtt": ["Bucket", "Arn"]}}}


def test_a_watchdog_deletes_nothing_but_marks_and_its_words_to_stop_and_only_its_rule_may_invoke_it() -> None:
    made = template(SHAPE)["Resources"]
    statements = made["WatchdogRole"]["Properties"]["Policies"][0]["PolicyDocument"]["Statement"]
    (deletes,) = [statement["Resource"] for statement in statements if "s3:DeleteObject" in statement["Action"]]
    assert deletes == [{"Fn::Sub": "${Bucket.Arn}/runs/_watch/*"}, {"Fn::Sub": "${Bucket.Arn}/stops/*"}]
    (permission,) = resources("AWS::Lambda::Permission")
    assert permission["SourceArn"] == {"Fn::GetAtt": ["EveryMinute", "Arn"]}
    (target,) = made["EveryMinute"]["Properties"]["Targets"]
    storage = "s3://${Bucket}/runs?region=${AWS::Region}"
    spec = WatchSpec(storage=storage, platform="aws-lambda://funcpipe?region=${AWS::Region}")
    assert from_text(WatchSpec, target["Input"]["Fn::Sub"], source="the rule") == spec
    without = template(Shape(name="funcpipe", memory_mb=(1024, 10240), watchdog=False))["Resources"]
    assert made.keys() - without.keys() == {
        "Watchdog",
        "WatchdogRole",
        "WatchdogInvocation",
        "WatchdogPermission",
        "EveryMinute",
    }


def test_a_deployment_s_secret_is_shown_nowhere_but_in_its_functions() -> None:
    made = template(SHAPE)
    assert made["Parameters"]["Secret"] == {"Type": "String", "NoEcho": True, "MinLength": 32}
    for function in resources("AWS::Lambda::Function"):
        assert function["Environment"]["Variables"]["FUNCPIPE_SECRET"] == {"Ref": "Secret"}
    assert template_text(SHAPE).count('"Ref": "Secret"') == len(resources("AWS::Lambda::Function")) == 3


def test_what_is_made_expires() -> None:
    (bucket,) = resources("AWS::S3::Bucket")
    rules = {rule["Prefix"]: rule for rule in bucket["LifecycleConfiguration"]["Rules"]}
    assert rules.keys() >= {"runs/", "sources/", "stops/"}
    assert [rule["NoncurrentVersionExpiration"] for rule in rules.values()] == [{"NoncurrentDays": 1}] * len(rules)
    assert rules["runs/"]["ExpirationInDays"] == 7
    longer = template(replace(SHAPE, keep_days=30))["Resources"]["Bucket"]["Properties"]["LifecycleConfiguration"]
    days = {rule["Prefix"]: rule["ExpirationInDays"] for rule in longer["Rules"]}
    assert (days["runs/"], days["stops/"]) == (30, 1)
    with pytest.raises(InvalidValue, match="keep_days must be a whole number"):
        replace(SHAPE, keep_days=1)
    assert [logs["RetentionInDays"] for logs in resources("AWS::Logs::LogGroup")] == [14]
    assert [repository["EmptyOnDelete"] for repository in resources("AWS::ECR::Repository")] == [True]


@given(memory=st.integers(-10, 20_000))
def test_only_sizes_that_lambda_has_are_admitted(memory: int) -> None:
    if 128 <= memory <= 10_240:
        assert Shape(name="a", memory_mb=(memory,)).memory_mb == (memory,)
    else:
        with pytest.raises(InvalidValue, match="must be 128 to 10240 MB"):
            Shape(name="a", memory_mb=(memory,))


@pytest.mark.parametrize("name", ["", "Upper", "a_b", "a" * 25, "ä"])
def test_names_that_buckets_cannot_have_are_refused(name: str) -> None:
    with pytest.raises(InvalidValue, match="name must"):
        Shape(name=name, memory_mb=(1024,))
