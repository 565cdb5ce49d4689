"""Resources of CloudFormation as funcpipe uses them: roles with few rights, functions of one image, their events."""

from collections.abc import Sequence
from typing import Any

from funcpipe.errors import PlatformRefused
from funcpipe.platforms.shared.data_buckets import DataBucket

IMAGE_PARAMETER = "ImageUri"
SECRET_PARAMETER = "Secret"
RUNS = "runs"
"""The prefix of the bucket under which runs keep their objects."""

PUSH = (
    "ecr:BatchCheckLayerAvailability",
    "ecr:InitiateLayerUpload",
    "ecr:UploadLayerPart",
    "ecr:CompleteLayerUpload",
    "ecr:PutImage",
    "ecr:BatchGetImage",
)
"""The rights to push an image (docs.aws.amazon.com/AmazonECR/latest/userguide/image-push-iam.html, 2026-11)."""

ARCHITECTURE = "x86_64"
"""The processors of all functions, which their image is built for."""

_PLANNED_FOR = {"aws-lambda": "x86_64", "aws-lambda-arm": "arm64"}

Node = dict[str, Any]
Rights = Sequence[tuple[Sequence[str], object] | tuple[Sequence[str], object, Node]]
"""Actions, beside them what they may be done to, and on which condition, if there is one."""


def check_processors(platform: str, found: str, *, functions: str) -> None:
    """Raise PlatformRefused if a plan for `platform` is for other processors than those `found` in the `functions`.

    Times and prices of such a plan would be wrong. Plans for specifications of other names are for any processors.
    """
    wanted = _PLANNED_FOR.get(platform, found)
    if wanted != found:
        (right,) = [name for name, processors in _PLANNED_FOR.items() if processors == found]
        raise PlatformRefused(
            f"the plan is for {platform}, whose functions have {wanted} processors; {functions} {found}: "
            f"plan again with --platform {right}"
        )


def role(service: str, rights: Rights) -> Node:
    """Return a role for `service` that may do each of the actions to the resources beside them, and nothing else."""
    trust = {"Effect": "Allow", "Principal": {"Service": service}, "Action": "sts:AssumeRole"}
    return {
        "Type": "AWS::IAM::Role",
        "Properties": {
            "AssumeRolePolicyDocument": {"Version": "2012-10-17", "Statement": [trust]},
            "Policies": [{"PolicyName": "funcpipe", "PolicyDocument": policy(rights)}],
        },
    }


def policy(rights: Rights) -> Node:
    """Return a policy that allows each of the actions to be done to the resources beside them, and nothing else."""
    statements = [
        {"Effect": "Allow", "Action": list(actions), "Resource": to, **({"Condition": only[0]} if only else {})}
        for actions, to, *only in rights
    ]
    return {"Version": "2012-10-17", "Statement": statements}


def objects(prefix: str) -> Node:
    """Return all objects of the bucket below a prefix."""
    return {"Fn::Sub": f"${{Bucket.Arn}}/{prefix}/*"}


def reading(bucket: DataBucket) -> Rights:
    """Return the rights to read the objects of a bucket of data, and list them."""
    arn = "arn:${AWS::Partition}:s3:::"
    listing = (["s3:ListBucket"], {"Fn::Sub": arn + bucket.name}, {"StringLike": {"s3:prefix": [bucket.below]}})
    return [(["s3:GetObject"], {"Fn::Sub": arn + bucket.objects}), listing]


def function(name: str, memory_mb: int, timeout_s: int, *, role: str, environment: Node) -> Node:
    """Return a function, which is there as soon as the parameter ImageUri names its image.

    Functions hand over to functions, in chains that Lambda drops after about 16 unless it is configured to allow them
    (docs.aws.amazon.com/lambda/latest/dg/invocation-recursion.html, 2026-11).
    """
    return {
        "Type": "AWS::Lambda::Function",
        "Condition": "HasImage",
        "Properties": {
            "FunctionName": name,
            "PackageType": "Image",
            "Architectures": [ARCHITECTURE],
            "Code": {"ImageUri": {"Ref": IMAGE_PARAMETER}},
            "MemorySize": memory_mb,
            "Timeout": timeout_s,
            "Role": {"Fn::GetAtt": [role, "Arn"]},
            "Environment": {"Variables": environment},
            "RecursiveLoop": "Allow",
            "LoggingConfig": {"LogFormat": "JSON", "LogGroup": {"Ref": "Logs"}},
        },
    }


def invocation(function: str, queued_s: int) -> Node:
    """Return the settings of events: no retries, which would train a step twice, and a record of those that failed.

    An event that Lambda could not start within `queued_s` is given up and recorded as a failure.
    """
    return {
        "Type": "AWS::Lambda::EventInvokeConfig",
        "Condition": "HasImage",
        "Properties": {
            "FunctionName": {"Ref": function},
            "Qualifier": "$LATEST",
            "MaximumRetryAttempts": 0,
            "MaximumEventAgeInSeconds": queued_s,
            "DestinationConfig": {"OnFailure": {"Destination": {"Fn::GetAtt": ["Bucket", "Arn"]}}},
        },
    }
