"""The policy of who deploys: all that the calls need, nothing else, and for this deployment alone."""

import json
import re
from fnmatch import fnmatchcase
from importlib import resources
from pathlib import Path
from typing import Any

import boto3
import pytest

from funcpipe.cli import main
from funcpipe.core.provisioned import Provisioned
from funcpipe.platforms.aws.account import Account
from funcpipe.platforms.aws.deployment import Deployer, lambda_package
from funcpipe.platforms.aws.functions import AwsPlatform
from funcpipe.platforms.aws.resources import deployer_policy
from funcpipe.platforms.aws.template import Shape, template, template_text
from funcpipe.platforms.catalog import load_spec
from funcpipe.platforms.shared.package import Docker
from tests.cloud_emulation import rights
from tests.cloud_emulation.aws import AwsCloud
from tests.e2e import small
from tests.platforms.aws.conftest import OFTEN, PLATFORM

SHAPE = Shape(name="funcpipe", memory_mb=(1024,))
POLICY = deployer_policy("funcpipe", region="us-east-1", account="123456789012")
NEEDS_NO_RIGHT = {"sts:GetCallerIdentity"}

UNSET = {
    "AWS::S3::Bucket": {
        "AbacStatus": "s3:PutBucketAbac",
        "AccelerateConfiguration": "s3:PutAccelerateConfiguration",
        "AccessControl": "s3:Put*Acl",
        "AnalyticsConfigurations": "s3:*AnalyticsConfiguration",
        "BucketEncryption": "s3:*Encryption*",
        "CorsConfiguration": "s3:*BucketCORS s3:*BucketCors",
        "IntelligentTieringConfigurations": "s3:PutIntelligentTieringConfiguration",
        "InventoryConfigurations": "s3:PutInventoryConfiguration",
        "LoggingConfiguration": "s3:PutBucketLogging",
        "MetadataTableConfiguration": "s3*:*Table* s3tables:*",
        "MetadataConfiguration": "s3:UpdateBucketMetadata*",
        "MetricsConfigurations": "s3:*MetricsConfiguration",
        "NotificationConfiguration": "s3:PutBucketNotification",
        "ObjectLockConfiguration": "s3:Put*ObjectLockConfiguration",
        "ReplicationConfiguration": "s3:*Replication*",
        "Tags": "s3:*[Tt]ag*",
        "VersioningConfiguration": "s3:PutBucketVersioning",
        "WebsiteConfiguration": "s3:*BucketWebsite",
    },
    "AWS::ECR::Repository": {
        "EncryptionConfiguration": "kms:*",
        "ImageScanningConfiguration": "ecr:PutImageScanningConfiguration",
        "ImageTagMutability": "ecr:PutImageTagMutability",
        "Tags": "ecr:TagResource ecr:UntagResource",
    },
    "AWS::Lambda::Function": {
        "CapacityProviderConfig": "lambda:PassCapacityProvider",
        "CodeSigningConfigArn": "lambda:GetCodeSigningConfig lambda:PutFunctionCode* lambda:DeleteFunctionCode*",
        "FileSystemConfigs": "*:*MountTargets",
        "FunctionScalingConfig": "lambda:PutFunctionScalingConfig",
        "Handler": "s3:GetObject s3:GetObjectVersion",
        "KmsKeyArn": "kms:*",
        "Layers": "lambda:GetLayerVersion",
        "PublishToLatestPublished": "lambda:PublishVersion",
        "ReservedConcurrentExecutions": "lambda:*FunctionConcurrency",
        "Runtime": "lambda:AssociateRuntimeAlias",
        "RuntimeManagementConfig": "lambda:PutRuntimeManagementConfig",
        "Tags": "lambda:TagResource lambda:UntagResource",
        "VpcConfig": "ec2:*",
    },
    "AWS::Events::Rule": {"Tags": "events:TagResource events:UntagResource"},
    "AWS::IAM::Role": {
        "Description": "iam:UpdateRoleDescription",
        "ManagedPolicyArns": "iam:AttachRolePolicy iam:DetachRolePolicy",
        "MaxSessionDuration": "iam:UpdateRole",
        "PermissionsBoundary": "iam:*PermissionsBoundary",
        "Tags": "iam:TagRole iam:UntagRole",
    },
    "AWS::Logs::LogGroup": {
        "BearerTokenAuthenticationEnabled": "logs:PutBearerTokenAuthentication",
        "DataProtectionPolicy": "logs:PutData* logs:DeleteData* logs:CreateLogDelivery s3:REST* firehose:*",
        "DeletionProtectionEnabled": "logs:PutLogGroupDeletionProtection",
        "FieldIndexPolicies": "logs:PutIndexPolicy logs:DeleteIndexPolicy",
        "KmsKeyId": "logs:AssociateKmsKey logs:DisassociateKmsKey",
        "ResourcePolicyDocument": "logs:PutResourcePolicy logs:DeleteResourcePolicy",
        "Tags": "logs:TagResource logs:UntagResource",
    },
}
"""Properties that the template leaves out, and what CloudFormation may do for their sake alone."""

ALWAYS_SET = {
    "s3:DeleteBucketLifecycle": "LifecycleConfiguration",
    "ecr:DeleteLifecyclePolicy": "LifecyclePolicy",
    "ecr:DeleteRepositoryPolicy": "RepositoryPolicyText",
    "logs:DeleteRetentionPolicy": "RetentionInDays",
}
"""What CloudFormation does when a property is taken away, which every version of the template has."""

OWN = ("funcpipe", "servicequotas", ":scalable-target/", "/lambda.application-autoscaling.amazonaws.com/")
"""What is of this deployment, of the account's quotas, or of the service that scales functions."""

UNRECORDED = {
    "codebuild:CreateProject": "CloudFormation publishes no schema of projects",
    "codebuild:UpdateProject": "CloudFormation publishes no schema of projects",
    "codebuild:DeleteProject": "CloudFormation publishes no schema of projects",
    "cloudformation:DescribeStackEvents": "asked for when a stack has failed",
    "iam:CreateServiceLinkedRole": "by Application Auto Scaling, in an account that has not used it for functions",
    "logs:GetLogEvents": "asked for when a build has failed",
    "ecr:GetAuthorizationToken": "asked for where docker runs, as what follows (ECR user guide, image-push-iam.html)",
    "ecr:BatchCheckLayerAvailability": "docker push",
    "ecr:InitiateLayerUpload": "docker push",
    "ecr:UploadLayerPart": "docker push",
    "ecr:CompleteLayerUpload": "docker push",
    "ecr:PutImage": "docker push",
    "ecr:BatchGetImage": "docker push",
}


def granted() -> set[str]:
    return {action for statement in POLICY["Statement"] for action in statement["Action"]}


def is_granted(action: str) -> bool:
    return any(fnmatchcase(action, pattern) for pattern in granted())


def needed_by_cloudformation() -> set[str]:
    found: set[str] = set()
    for kind in {resource["Type"] for resource in template(SHAPE)["Resources"].values()}:
        unset = " ".join(UNSET.get(kind, {}).values()).split()
        found |= {a for a in rights.of_resource(kind) if not any(fnmatchcase(a, pattern) for pattern in unset)}
    return found - ALWAYS_SET.keys()


def test_it_grants_what_calls_need_and_nothing_else(
    cloud: AwsCloud, account: Account, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", cloud.endpoint)
    deployer = Deployer(account, sleep=lambda s: None, docker=Docker("a-docker-that-is-not-there"))
    for _ in range(2):
        deployer.deploy(SHAPE, lambda_package())
    platform, plan = AwsPlatform(load_spec("aws-lambda"), account, polling=OFTEN), small.plan(1, 1)
    platform.check(plan)
    for run in ("one", "two"):
        platform.provision(plan, run, Provisioned(share=0.9, spare={}, released_after_s=600.0))
        platform.release(plan, run)
    measure = ["platforms", "measure", PLATFORM, "--max-usd", "0.01", "-o", str(tmp_path / "found.json")]
    assert main(measure) == 0
    deployer.destroy("funcpipe")
    needed = rights.of_calls(cloud.calls) - NEEDS_NO_RIGHT | needed_by_cloudformation()
    assert {action for action in needed if not is_granted(action)} == set()
    unused = {pattern for pattern in granted() if not any(fnmatchcase(action, pattern) for action in needed)}
    assert unused == UNRECORDED.keys()


def test_what_it_leaves_out_is_for_properties_that_the_template_does_not_have() -> None:
    made = template(SHAPE)["Resources"].values()
    for kind, unset in UNSET.items():
        used = {name for resource in made if resource["Type"] == kind for name in resource["Properties"]}
        assert used
        assert unset.keys() <= rights.properties_of(kind) - used
    assert set(ALWAYS_SET.values()) <= {name for resource in made for name in resource["Properties"]}


def test_it_is_for_this_deployment_wherever_iam_lets_it_be() -> None:
    known: dict[str, Any] = json.loads(
        (resources.files("cfnlint") / "data" / "AdditionalSpecs" / "Policies.json").read_text()
    )
    for statement in POLICY["Statement"]:
        places = [statement["Resource"]] if isinstance(statement["Resource"], str) else statement["Resource"]
        for action in [action for action in statement["Action"] if "*" not in action]:
            service, _, name = action.partition(":")
            has_resources = "Resources" in known[service]["Actions"][name.lower()]
            assert (places == ["*"]) != has_resources, action
        for place in places:
            assert place == "*" or (place.startswith("arn:aws:") and any(name in place for name in OWN))
            assert place == "*" or ":123456789012:" in place or place.startswith("arn:aws:s3:::funcpipe-123456789012-")
    (passing,) = [statement for statement in POLICY["Statement"] if "iam:PassRole" in statement["Action"]]
    assert passing["Condition"]["StringEquals"]["iam:PassedToService"] == [
        "lambda.amazonaws.com",
        "codebuild.amazonaws.com",
    ]
    assert len(re.sub(r"\s", "", json.dumps(POLICY))) <= 6144  # the most that a managed policy of IAM may have


def test_its_places_are_those_that_the_stack_makes(cloud: AwsCloud, deployed: Account) -> None:
    stack = cloud.client("cloudformation").describe_stacks()["Stacks"][0]["StackId"]
    roles = [role["Arn"] for role in cloud.client("iam").list_roles()["Roles"]]
    functions = [function["FunctionArn"] for function in cloud.client("lambda").list_functions()["Functions"]]
    repositories = cloud.client("ecr").describe_repositories()["repositories"]
    groups = [group["arn"] for group in cloud.client("logs").describe_log_groups()["logGroups"]]
    buckets = [f"arn:aws:s3:::{bucket['Name']}" for bucket in cloud.client("s3").list_buckets()["Buckets"]]
    made = [stack, *roles, *functions, *(found["repositoryArn"] for found in repositories), *groups, *buckets]
    places = [place for statement in POLICY["Statement"] for place in statement["Resource"]]
    for place in made:
        assert any(fnmatchcase(place, pattern) for pattern in places), place


@pytest.mark.parametrize(("region", "partition"), [("cn-north-1", "aws-cn"), ("us-gov-west-1", "aws-us-gov")])
def test_its_places_are_those_of_the_region_s_own_part_of_aws(
    region: str, partition: str, cloud: AwsCloud, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the template makes there, but for functions, whose image moto would have to have."""

    def client(service: str) -> Any:
        return boto3.client(service, region_name=region, endpoint_url=cloud.moto)

    given = {"ImageUri": "", "Secret": "x" * 40}
    parameters = [{"ParameterKey": name, "ParameterValue": value} for name, value in given.items()]
    client("cloudformation").create_stack(
        StackName="funcpipe",
        TemplateBody=template_text(SHAPE),
        Parameters=parameters,
        Capabilities=["CAPABILITY_IAM"],
    )
    (stack,) = client("cloudformation").describe_stacks()["Stacks"]
    roles = [role["Arn"] for role in client("iam").list_roles()["Roles"]]
    repositories = [found["repositoryArn"] for found in client("ecr").describe_repositories()["repositories"]]
    groups = [group["arn"] for group in client("logs").describe_log_groups()["logGroups"]]
    buckets = [f"arn:{partition}:s3:::{bucket['Name']}" for bucket in client("s3").list_buckets()["Buckets"]]
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    words = ["deploy", "aws", "--print-deployer-policy", "--region", region, "--set", "platform.account=123456789012"]
    assert main(words) == 0
    printed = json.loads(capsys.readouterr().out)
    places = [place for statement in printed["Statement"] for place in statement["Resource"] if place != "*"]
    assert {place.split(":")[1] for place in places} == {partition}
    for place in [stack["StackId"], *roles, *repositories, *groups, *buckets]:
        assert any(fnmatchcase(place, pattern) for pattern in places), place


def test_it_is_printed_without_credentials(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    words = ["deploy", "aws", "--print-deployer-policy", "--region", "us-east-1"]
    assert main([*words, "--set", "platform.account=123456789012"]) == 0
    assert json.loads(capsys.readouterr().out) == POLICY
    assert main([*words, "--name", "mine"]) == 0
    printed = capsys.readouterr().out
    assert "arn:aws:s3:::mine-${aws:PrincipalAccount}-us-east-1" in printed
    assert "arn:aws:ecr:us-east-1:*:repository/mine" in printed
    assert main(["deploy", "aliyun", "--print-deployer-policy"]) == 2
    assert "for aws only" in capsys.readouterr().err
    assert main([*words, "--set", "platform.account=me"]) == 2
    assert "account must be 12 digits" in capsys.readouterr().err


def test_the_docs_name_every_right() -> None:
    text = (Path(__file__).parents[3] / "docs" / "aws.md").read_text()
    begin = text.index("## Rights")
    named = set(re.findall(r"`([a-z0-9-]+:[A-Za-z*]+)`", text[begin : text.index("\n## ", begin + 1)]))
    assert named == granted()
