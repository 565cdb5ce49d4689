"""The IAM policy for deploying, using and destroying a deployment: its resources, and no others.

CloudFormation acts with the rights of who calls it. What it does to a resource is in the resource's public schema
(github.com/aws-cloudformation, `handlers`); what only other properties than the template's need is left out.
"""

from funcpipe.errors import InvalidValue
from funcpipe.platforms.aws.quotas import BUILDS
from funcpipe.platforms.aws.resources import PUSH, Node, Rights, policy
from funcpipe.platforms.aws.template import bucket_in, check_name, log_group

_ANY = "*"
_SERVICES = ("lambda.amazonaws.com", "codebuild.amazonaws.com")


def deployer_policy(name: str, *, region: str, account: str | None = None, partition: str = "aws") -> Node:
    """Return the policy for the deployment `name`; without the number of an `account`, for the account that has it.

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
        (_of("events", _RULE), place("events", f"rule/{name}-*")),
        (
            _of("logs", _LOGS),
            place("logs", f"log-group:{log_group(name)}") + place("logs", f"log-group:{log_group(name)}:*"),
        ),
        (_of("codebuild", _PROJECT), place("codebuild", f"project/{name}")),
        (_of("iam", _ROLE), [roles]),
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
)
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
