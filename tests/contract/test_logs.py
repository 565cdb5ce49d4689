"""One suite for the logs of every platform: local, and the emulated clouds."""

from tests.platforms.aws import conftest as aws

pytest_plugins = ()

moto_url, aws_cloud, aws_account, aws_deployed = aws.moto_url, aws.cloud, aws.account, aws.deployed
