"""Which rights calls need: those that an account has recorded, and those that CloudFormation makes for a template.

What CloudFormation does is in the schemas of its resources (`handlers`), which cfn-lint has a copy of.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import botocore.session

from tests.cloud_emulation.lambda_runtime import REGION

_REST = (
    (r"POST /2015-03-31/functions/[\w-]+/invocations", "lambda:InvokeFunction"),
    (r"GET /2015-03-31/functions/[\w-]+/configuration", "lambda:GetFunctionConfiguration"),
    (r"GET /2016-08-19/account-settings", "lambda:GetAccountSettings"),
    (r"POST /2015-03-31/functions/[\w-]+/versions", "lambda:PublishVersion"),
    (r"POST /2015-03-31/functions/[\w-]+/aliases", "lambda:CreateAlias"),
    (r"PUT /2015-03-31/functions/[\w-]+/aliases/\w+", "lambda:UpdateAlias"),
    (r"GET /2015-03-31/functions/[\w-]+/aliases/\w+", "lambda:GetAlias"),
    (r"GET /2019-09-25/functions/[\w-]+/event-invoke-config", "lambda:GetFunctionEventInvokeConfig"),
    (r"PUT /2019-09-25/functions/[\w-]+/event-invoke-config", "lambda:PutFunctionEventInvokeConfig"),
    (r"GET /2019-09-30/functions/[\w-]+/provisioned-concurrency", "lambda:GetProvisionedConcurrencyConfig"),
    (r"PUT /2019-09-30/functions/[\w-]+/provisioned-concurrency", "lambda:PutProvisionedConcurrencyConfig"),
    (r"DELETE /2019-09-30/functions/[\w-]+/provisioned-concurrency", "lambda:DeleteProvisionedConcurrencyConfig"),
    (r"LIST /2019-09-30/functions/[\w-]+/provisioned-concurrency", "lambda:ListProvisionedConcurrencyConfigs"),
    (r"GET /[\w-]+", "s3:ListBucket"),
    (r"POST /[\w-]+", "s3:DeleteObject"),
    (r"DELETE /[\w-]+/.+", "s3:DeleteObject"),
    (r"PUT /[\w-]+/.+", "s3:PutObject"),
    (r"GET /[\w-]+/.+", "s3:GetObject"),
)


def of_calls(calls: Iterable[str]) -> set[str]:
    """The right that each of the calls needs, by its name in an account's record."""
    session = botocore.session.Session()
    names = {
        operation: f"{service.replace('-', '')}:{operation}"
        for service in ("sts", "cloudformation", "ecr", "codebuild", "logs", "service-quotas")
        for operation in session.get_service_model(service).operation_names
    }
    scaling = session.get_service_model("application-autoscaling").operation_names
    names |= {operation: f"application-autoscaling:{operation}" for operation in scaling}
    return {names.get(call) or _of_rest(call) for call in set(calls)}


def of_resource(kind: str) -> set[str]:
    """What CloudFormation may do to make, look at, change and delete a resource; nothing where it does not say."""
    handlers = _schema(kind).get("handlers", {})
    return {action for verb in ("create", "read", "update", "delete") for action in _permissions(handlers, verb)}


def properties_of(kind: str) -> set[str]:
    """The properties that a resource may have."""
    return set(_schema(kind)["properties"])


def _permissions(handlers: Mapping[str, Any], verb: str) -> list[str]:
    return list(handlers.get(verb, {}).get("permissions", ()))


def _schema(kind: str) -> dict[str, Any]:
    from cfnlint.schema import PROVIDER_SCHEMA_MANAGER

    found: dict[str, Any] = PROVIDER_SCHEMA_MANAGER.get_resource_schema(REGION, kind).schema
    return found


def _of_rest(call: str) -> str:
    (found, *_) = [action for pattern, action in _REST if re.fullmatch(pattern, call)]
    return found
