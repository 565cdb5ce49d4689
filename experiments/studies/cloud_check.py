"""Whether funcpipe works on your cloud account, in about ten minutes and for less than --max-usd dollars.

Deploys, measures, trains a network on handwritten digits while a function is killed and others hand over, compares the
parameters with those of one process, prints our bill beside the cloud's record of the same functions, destroys, and
looks for what is left. `make cloud-aws` and `make cloud-aliyun` run it. The tests do the same on emulated accounts.

The cloud's record is what it keeps for its bill, at list prices: the billed duration in Lambda's report of each
invocation, or the duration of each task of Function Compute. Requests are as the functions counted them: S3 counts them
in request metrics alone, which are paid, and Cost Explorer tells a day later.
"""

import argparse

from funcpipe.errors import FuncPipeError
from funcpipe.platforms.aliyun.account import Account as AliyunAccount
from funcpipe.platforms.aws.account import Account as AwsAccount
from tests.cloud import accounts
from tests.cloud.check import CloudUnderTest, Pace, check, most_usd

PACE = Pace(steps=100, pause_s=0.75, lifetime_s=100.0)  # 150 s: each function hands over once or twice
NEEDS = {
    "aws": "AWS credentials, as for its command line, with the rights that `funcpipe deploy aws "
    "--print-deployer-policy --name funcpipe-check` prints, and a region: --region or AWS_DEFAULT_REGION",
    "aliyun": "OSS_ACCESS_KEY_ID and OSS_ACCESS_KEY_SECRET, a region: --region or ALIBABA_CLOUD_REGION, and a docker "
    "that is logged in to --repository, a repository of that region in Container Registry",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cloud", choices=NEEDS)
    parser.add_argument("--region")
    parser.add_argument("--repository", help="for the image, on Alibaba Cloud")
    parser.add_argument("--max-usd", type=float, default=0.50)
    options = parser.parse_args()
    print(f"This needs {NEEDS[options.cloud]}.", flush=True)
    if options.cloud == "aliyun" and not options.repository:
        parser.error("--repository names no repository for the image")
    try:
        cloud = account(options)
        print(
            f"It makes the deployment funcpipe-check on {cloud.name} and removes it again; it costs "
            f"${most_usd(cloud):.2f} at most, usually a tenth of that.",
            flush=True,
        )
        found = check(cloud, PACE, max_usd=options.max_usd, say=show)
    except FuncPipeError as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from None
    if found.failures:
        raise SystemExit("\n".join(("FAILED:", *found.failures)))
    print("everything is as it must be", flush=True)


def account(options: argparse.Namespace) -> CloudUnderTest:
    """The account that the environment's credentials open."""
    if options.cloud == "aws":
        return accounts.on_aws(AwsAccount(region=options.region), say=show)
    return accounts.on_aliyun(AliyunAccount(region=options.region), options.repository, say=show)


def show(text: str) -> None:
    print(f"   {text}", flush=True)


if __name__ == "__main__":
    main()
