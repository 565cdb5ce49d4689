"""The CloudFormation template of a deployment: the form of record of everything that `funcpipe deploy aws` makes."""

import json
from dataclasses import dataclass

from funcpipe.core import WATCH_PREFIX, WatchSpec, checks, to_text
from funcpipe.core.settings import KEEP_DAYS, LEAST_KEEP_DAYS
from funcpipe.errors import InvalidValue
from funcpipe.platforms.aws.resources import (
    FAILURES,
    IMAGE_PARAMETER,
    LEAST_MEMORY_MB,
    MOST_MEMORY_MB,
    PUSH,
    RUNS,
    SECRET_PARAMETER,
    Node,
    Rights,
    bucket_in,
    check_name,
    function,
    function_name,
    invocation,
    log_group,
    objects,
    reading,
    role,
)
from funcpipe.platforms.shared.cloud import SECRET
from funcpipe.platforms.shared.deployment import DataBucket
from funcpipe.platforms.shared.package import MOST_IMAGE_BYTES

LIFETIME_S = 900
SOURCES = "sources"

_ENVIRONMENT = {"FUNCPIPE_CONTROL": {"Fn::Sub": "s3://${Bucket}"}, SECRET: {"Ref": SECRET_PARAMETER}}
_QUEUED_S = 120
WATCHDOG_MB = 256  # Python and boto3 take 70
_WATCHDOG_S = 240  # several times what it takes until a silent function counts as lost
_LOGGING = ("logs:CreateLogStream", "logs:PutLogEvents", "logs:FilterLogEvents")
_EXPIRY_DAYS = {f"{FAILURES}/": 7, "stops/": 1, f"{SOURCES}/": 1}  # and those of runs, as is wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The shape of a deployment: its name, which is the stack's, and a function of each memory size.

    With a `watchdog`, detached runs are watched every minute. Functions that train may read `data`. Objects of
    runs expire `keep_days` days after they were written.
    """

    name: str
    memory_mb: tuple[int, ...]
    log_days: int = 14
    keep_days: int = KEEP_DAYS
    watchdog: bool = True
    data: tuple[DataBucket, ...] = ()

    def __post_init__(self) -> None:
        check_name(self.name)
        checks.whole("keep_days", self.keep_days, LEAST_KEEP_DAYS)
        checks.filled("memory_mb", self.memory_mb)
        checks.distinct("memory_mb", [str(memory) for memory in self.memory_mb])
        for memory in self.memory_mb:
            if not LEAST_MEMORY_MB <= memory <= MOST_MEMORY_MB:
                raise InvalidValue("memory", memory, f"must be {LEAST_MEMORY_MB} to {MOST_MEMORY_MB} MB on AWS Lambda")


def template(shape: Shape) -> Node:
    """Return the template; its functions are there as soon as the parameter ImageUri names their image."""
    functions = {}
    for memory in shape.memory_mb:
        functions[f"Function{memory}"] = _function(shape, memory)
        functions[f"Invocation{memory}"] = invocation(f"Function{memory}", _QUEUED_S)
    watchdog = _watchdog(shape) if shape.watchdog else {}
    return {
        "AWSTemplateFormatVersion": "2010-09-09",
        "Description": "funcpipe: functions that train, their image, their storage and their logs",
        "Parameters": {
            IMAGE_PARAMETER: {"Type": "String", "Default": ""},
            SECRET_PARAMETER: {"Type": "String", "NoEcho": True, "MinLength": 32},
        },
        "Conditions": {"HasImage": {"Fn::Not": [{"Fn::Equals": [{"Ref": IMAGE_PARAMETER}, ""]}]}},
        "Resources": {
            "Bucket": _bucket(shape),
            "Logs": {
                "Type": "AWS::Logs::LogGroup",
                "DeletionPolicy": "Delete",
                "UpdateReplacePolicy": "Delete",
                "Properties": {"LogGroupName": log_group(shape.name), "RetentionInDays": shape.log_days},
            },
            "Repository": _repository(shape),
            "FunctionRole": role("lambda.amazonaws.com", _function_rights(shape)),
            "BuildRole": role("codebuild.amazonaws.com", _build_rights()),
            "Build": _build(shape),
            **functions,
            **watchdog,
        },
        "Outputs": {
            "Bucket": {"Value": {"Ref": "Bucket"}},
            "Repository": {"Value": {"Fn::GetAtt": ["Repository", "RepositoryUri"]}},
        },
    }


def template_text(shape: Shape) -> str:
    """Return the template as a file."""
    return json.dumps(template(shape), indent=1) + "\n"


def _bucket(shape: Shape) -> Node:
    rules = [
        {
            "Id": prefix.strip("/").replace("/", "-"),
            "Status": "Enabled",
            "Prefix": prefix,
            "ExpirationInDays": days,
            "NoncurrentVersionExpiration": {"NoncurrentDays": 1},  # if versioning is switched on
            "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 1},
        }
        for prefix, days in ({f"{RUNS}/": shape.keep_days} | _EXPIRY_DAYS).items()
    ]
    closed = ("BlockPublicAcls", "BlockPublicPolicy", "IgnorePublicAcls", "RestrictPublicBuckets")
    return {
        "Type": "AWS::S3::Bucket",
        "DeletionPolicy": "Delete",
        "UpdateReplacePolicy": "Delete",
        "Properties": {
            "BucketName": {"Fn::Sub": bucket_in("${AWS::AccountId}", "${AWS::Region}", deployment=shape.name)},
            "LifecycleConfiguration": {"Rules": rules},
            "PublicAccessBlockConfiguration": dict.fromkeys(closed, True),
            "OwnershipControls": {"Rules": [{"ObjectOwnership": "BucketOwnerEnforced"}]},
        },
    }


def _repository(shape: Shape) -> Node:
    keep = {
        "rulePriority": 1,
        "selection": {"tagStatus": "any", "countType": "imageCountMoreThan", "countNumber": 2},
        "action": {"type": "expire"},
    }
    return {
        "Type": "AWS::ECR::Repository",
        "DeletionPolicy": "Delete",
        "UpdateReplacePolicy": "Delete",
        "Properties": {
            "RepositoryName": shape.name,
            "EmptyOnDelete": True,
            "LifecyclePolicy": {"LifecyclePolicyText": json.dumps({"rules": [keep]})},
            "RepositoryPolicyText": {
                "Version": "2012-10-17",
                "Statement": [
                    {
                        "Effect": "Allow",
                        "Principal": {"Service": "lambda.amazonaws.com"},
                        "Action": ["ecr:BatchGetImage", "ecr:GetDownloadUrlForLayer"],
                        "Condition": {"StringLike": {"aws:SourceArn": _functions(shape)}},
                    }
                ],
            },
        },
    }


def _function_rights(shape: Shape) -> Rights:
    """Return the rights of a function: to its runs' objects, to its deployment's functions and logs.

    Listing is for the whole bucket: without it, S3 answers 403 rather than 404 for an object that is not there yet.
    """
    return [
        (["s3:GetObject", "s3:PutObject", "s3:DeleteObject"], [objects(RUNS), objects("stops")]),
        (["s3:GetObject", "s3:PutObject"], objects(FAILURES)),
        (["s3:ListBucket"], {"Fn::GetAtt": ["Bucket", "Arn"]}),
        (["lambda:InvokeFunction"], _functions(shape)),
        (_LOGGING, {"Fn::GetAtt": ["Logs", "Arn"]}),
        *(right for bucket in shape.data for right in reading(bucket)),
    ]


def _watchdog_rights(shape: Shape) -> Rights:
    """Return the rights of a watchdog: read runs, start their functions and note that, stop these, and delete marks."""
    return [
        (["s3:GetObject", "s3:PutObject"], [objects(RUNS), objects("stops"), objects(FAILURES)]),
        (["s3:DeleteObject"], [objects(f"{RUNS}/{WATCH_PREFIX.strip('/')}"), objects("stops")]),
        (["s3:ListBucket"], {"Fn::GetAtt": ["Bucket", "Arn"]}),
        (["lambda:InvokeFunction"], _functions(shape)),
        (_LOGGING, {"Fn::GetAtt": ["Logs", "Arn"]}),
    ]


def _functions(shape: Shape) -> Node:
    return {"Fn::Sub": f"arn:${{AWS::Partition}}:lambda:${{AWS::Region}}:${{AWS::AccountId}}:function:{shape.name}-*"}


def _build_rights() -> Rights:
    return [
        (["s3:GetObject", "s3:GetObjectVersion"], objects(SOURCES)),
        (["ecr:GetAuthorizationToken"], "*"),  # the action admits no resource
        (PUSH, {"Fn::GetAtt": ["Repository", "Arn"]}),
        (["logs:CreateLogStream", "logs:PutLogEvents"], {"Fn::GetAtt": ["Logs", "Arn"]}),
    ]


def _build(shape: Shape) -> Node:
    """Return a CodeBuild project that makes the image from an archive in the bucket; it costs only while it builds."""
    size = "$(docker image inspect --format '{{.Size}}' $IMAGE)"
    commands = [
        "aws ecr get-login-password | docker login --username AWS --password-stdin ${IMAGE%%/*}",
        "docker build --platform linux/amd64 --provenance=false --tag $IMAGE .",
        f"test {size} -le {MOST_IMAGE_BYTES} || (echo funcpipe: image too large: {size} bytes; exit 1)",
        "docker push $IMAGE",
    ]
    spec = {"version": 0.2, "phases": {"build": {"on-failure": "ABORT", "commands": commands}}}
    return {
        "Type": "AWS::CodeBuild::Project",
        "Properties": {
            "Name": shape.name,
            "ServiceRole": {"Fn::GetAtt": ["BuildRole", "Arn"]},
            "TimeoutInMinutes": 30,
            "Artifacts": {"Type": "NO_ARTIFACTS"},
            "Environment": {
                "Type": "LINUX_CONTAINER",
                "ComputeType": "BUILD_GENERAL1_MEDIUM",
                "Image": "aws/codebuild/amazonlinux-x86_64-standard:5.0",
                "PrivilegedMode": True,  # for docker
            },
            "Source": {
                "Type": "S3",
                "Location": {"Fn::Sub": f"${{Bucket}}/{SOURCES}/package.zip"},
                "BuildSpec": json.dumps(spec),
            },
            "LogsConfig": {"CloudWatchLogs": {"Status": "ENABLED", "GroupName": {"Ref": "Logs"}}},
        },
    }


def _function(shape: Shape, memory_mb: int) -> Node:
    """Return a function that trains or measures."""
    name = function_name(shape.name, memory_mb)
    environment = {**_ENVIRONMENT, "FUNCPIPE_PRELOADS": "torch"}
    return function(name, memory_mb, LIFETIME_S, role="FunctionRole", environment=environment)


def _watchdog(shape: Shape) -> Node:
    """Return a small function that a rule invokes every minute with the payload of a watchdog, and what both may do."""
    storage = f"s3://${{Bucket}}/{RUNS}?region=${{AWS::Region}}"
    arn = {"Fn::GetAtt": ["Watchdog", "Arn"]}
    platform = f"aws-lambda://{shape.name}?region=${{AWS::Region}}"
    spec = to_text(WatchSpec(storage=storage, platform=platform))
    target = {"Id": "watchdog", "Arn": arn, "Input": {"Fn::Sub": spec}}
    return {
        "WatchdogRole": role("lambda.amazonaws.com", _watchdog_rights(shape)),
        "Watchdog": function(
            f"{shape.name}-watchdog",
            WATCHDOG_MB,
            _WATCHDOG_S,
            role="WatchdogRole",
            environment=_ENVIRONMENT,
        ),
        "WatchdogInvocation": invocation("Watchdog", 60),
        "EveryMinute": {
            "Type": "AWS::Events::Rule",
            "Condition": "HasImage",
            "Properties": {
                "Name": f"{shape.name}-watchdog",
                "ScheduleExpression": "rate(1 minute)",
                "State": "ENABLED",
                "Targets": [target],
            },
        },
        "WatchdogPermission": {
            "Type": "AWS::Lambda::Permission",
            "Condition": "HasImage",
            "Properties": {
                "Action": "lambda:InvokeFunction",
                "FunctionName": arn,
                "Principal": "events.amazonaws.com",
                "SourceArn": {"Fn::GetAtt": ["EveryMinute", "Arn"]},
            },
        },
    }
