"""The secret of a deployment, by which keys of runs are wrapped: its functions have it, and no others."""

from funcpipe.platforms.aws.account import Account
from funcpipe.platforms.aws.template import Shape
from funcpipe.platforms.shared.cloud import SECRET
from tests.cloud_emulation.aws import AwsCloud
from tests.platforms.aws.test_deployment import PACKAGE, deploy, deployer


def secrets(cloud: AwsCloud) -> set[str]:
    """The secrets that functions have."""
    functions = cloud.client("lambda").list_functions()["Functions"]
    return {function["Environment"]["Variables"][SECRET] for function in functions}


def test_a_deployment_keeps_its_secret_and_shares_it_with_no_other(cloud: AwsCloud, account: Account) -> None:
    deploy(account)
    (secret,) = secrets(cloud)
    assert len(secret) == 64
    deployer(account).deploy(Shape(name="funcpipe", memory_mb=(2048, 3008)), PACKAGE)
    assert secrets(cloud) == {secret}
    deployer(account).deploy(Shape(name="other", memory_mb=(1024,)), PACKAGE)
    assert len(secrets(cloud)) == 2
    stacks = cloud.client("cloudformation").describe_stacks()["Stacks"]
    assert secret not in str([stack.get("Outputs") for stack in stacks])
    assert secret not in str(cloud.client("cloudformation").get_template(StackName="funcpipe")["TemplateBody"])
