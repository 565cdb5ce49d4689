"""Names, resources and rights of a deployment on AWS: what CloudFormation makes, and what one needs to have it made."""

from collections.abc import Sequence
from typing import Any

from funcpipe.errors import InvalidValue, PlatformRefused
from funcpipe.platforms.aws.account import BUILDS
from funcpipe.platforms.shared.deployment import DataBucket

IMAGE_PARAMETER = "ImageUri"
SECRET_PARAMETER = "Secret"
RUNS = "runs"
"""The prefix of the bucket under which runs keep their objects."""

FAILURES = "aws/lambda/async"
"""The prefix of Lambda's records of asynchronous invocations that failed."""

LEAST_MEMORY_MB, MOST_MEMORY_MB = 128, 10_240

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


def check_name(deployment: str) -> None:
    """Raise InvalidValue for what cannot be the name of a deployment."""
    if not (deployment.isascii() and deployment.replace("-", "").isalnum() and deployment.islower()):
        raise InvalidValue("name", deployment, "must be small letters, digits and dashes")
    if len(deployment) > 24:  # a bucket's name, with account and region behind it, has at most 63 characters
        raise InvalidValue("name", deployment, "must have at most 24 characters")


def bucket_in(account: str, region: str, *, deployment: str) -> str:
    """Return the name of a deployment's bucket."""
    return f"{deployment}-{account}-{region}"


def function_name(deployment: str, memory_mb: int) -> str:
    """Return the name of the function of a size."""
    return f"{deployment}-{memory_mb}"


def log_group(deployment: str) -> str:
    """Return the one log group of a deployment."""
    return f"/funcpipe/{deployment}"


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


_ANY = "*"
_SCALER = "lambda.application-autoscaling.amazonaws.com"
_SERVICES = ("lambda.amazonaws.com", "codebuild.amazonaws.com")


def deployer_policy(name: str, *, region: str, account: str | None = None, partition: str = "aws") -> Node:
    """Return the policy to deploy, use and destroy `name`; without the number of an `account`, for the one that has it.

    CloudFormation acts with the rights of who calls it. What it does to a resource is in the resource's public schema
    (github.com/aws-cloudformation, `handlers`); what only other properties than the template's need is left out.

    The `partition` is that of the region, `aws-cn` or `aws-us-gov` in China and for the government.
    """
    check_name(name)
    if account is not None and not (account.isascii() and account.isdigit() and len(account) == 12):
        raise InvalidValue("account", account, "must be 12 digits")
    # after the fifth colon, and only there, a policy may say ${…} (IAM user guide, reference_policies_variables.html)
    bucket = f"arn:{partition}:s3:::{bucket_in(account or '${aws:PrincipalAccount}', region, deployment=name)}"
    number = account or _ANY
    roles = f"arn:{partition}:iam::{number}:role/{name}-*"

    def place(service: str, rest: str) -> list[str]:
        return [f"arn:{partition}:{service}:{region}:{number}:{rest}"]

    rights: Rights = [
        (_of("cloudformation", _STACK), place("cloudformation", f"stack/{name}/*")),
        (_of("s3", _BUCKET), [bucket]),
        (_of("s3", ("GetObject", "PutObject", "DeleteObject")), [f"{bucket}/*"]),
        ((*_of("ecr", _REPOSITORY), *PUSH), place("ecr", f"repository/{name}")),
        (_of("lambda", _FUNCTION), place("lambda", f"function:{name}-*")),
        (_of("application-autoscaling", _SCALING), place("application-autoscaling", "scalable-target/*")),
        (_of("events", _RULE), place("events", f"rule/{name}-*")),
        (
            _of("logs", _LOGS),
            place("logs", f"log-group:{log_group(name)}") + place("logs", f"log-group:{log_group(name)}:*"),
        ),
        (_of("codebuild", _PROJECT), place("codebuild", f"project/{name}")),
        (_of("iam", _ROLE), [roles]),
        (
            _of("iam", ("CreateServiceLinkedRole",)),
            [f"arn:{partition}:iam::{number}:role/aws-service-role/{_SCALER}/*"],
        ),
        (("servicequotas:GetServiceQuota",), place("servicequotas", f"{BUILDS.service}/{BUILDS.code}")),
        (_ALL, [_ANY]),
        (_of("iam", ("PassRole",)), [roles]),
    ]
    made = policy(rights)
    made["Statement"][-1]["Condition"] = {"StringEquals": {"iam:PassedToService": list(_SERVICES)}}
    return made


def _of(service: str, names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{service}:{name}" for name in names)


_STACK = ("CreateStack", "UpdateStack", "DeleteStack", "DescribeStacks", "DescribeStackEvents", "GetTemplate")
_BUCKET = (
    *("CreateBucket", "DeleteBucket", "ListBucket", "GetBucket*", "Get*Configuration"),
    *("PutLifecycleConfiguration", "PutBucketPublicAccessBlock", "PutBucketOwnershipControls"),
)
_REPOSITORY = (
    *("CreateRepository", "DeleteRepository", "DescribeRepositories", "DescribeImages", "ListTagsForResource"),
    *("GetLifecyclePolicy", "PutLifecyclePolicy", "GetRepositoryPolicy", "SetRepositoryPolicy"),
)
_FUNCTION = (
    *("CreateFunction", "DeleteFunction", "GetFunction", "UpdateFunctionCode", "UpdateFunctionConfiguration"),
    *("GetFunctionRecursionConfig", "PutFunctionRecursionConfig", "GetFunctionCodeSigningConfig"),
    *("GetFunctionScalingConfig", "GetRuntimeManagementConfig"),
    *("GetFunctionEventInvokeConfig", "PutFunctionEventInvokeConfig"),
    *("UpdateFunctionEventInvokeConfig", "DeleteFunctionEventInvokeConfig"),
    *("AddPermission", "RemovePermission", "GetPolicy", "GetFunctionConfiguration", "InvokeFunction"),
    *("PublishVersion", "GetAlias", "CreateAlias", "UpdateAlias", "*ProvisionedConcurrencyConfig*"),
)
_SCALING = ("RegisterScalableTarget", "PutScheduledAction", "DeregisterScalableTarget")
_RULE = (
    *("PutRule", "DeleteRule", "DescribeRule", "PutTargets", "RemoveTargets", "ListTargetsByRule"),
    "ListTagsForResource",
)
_LOGS = (
    *("CreateLogGroup", "DeleteLogGroup", "PutRetentionPolicy", "ListTagsForResource", "GetDataProtectionPolicy"),
    *("FilterLogEvents", "GetLogEvents"),
)
_PROJECT = ("CreateProject", "UpdateProject", "DeleteProject", "StartBuild", "BatchGetBuilds")
_ROLE = (
    *("CreateRole", "DeleteRole", "GetRole", "UpdateAssumeRolePolicy", "PutRolePolicy", "GetRolePolicy"),
    *("DeleteRolePolicy", "ListRolePolicies", "ListAttachedRolePolicies"),
)
_ALL = (
    *("ecr:GetAuthorizationToken", "lambda:GetAccountSettings", "logs:DescribeLogGroups"),
    *("logs:DescribeResourcePolicies", "logs:DescribeIndexPolicies"),
)
"""Actions that admit no resource."""
