"""What templates say of functions that moto leaves out."""

from collections.abc import Mapping
from typing import Any

Template = Mapping[str, Any]


def retries(template: Template, function: str) -> int:
    """How often a failed event is tried again."""
    return int(event_settings(template, function)["MaximumRetryAttempts"])


def oldest_s(template: Template, function: str) -> float:
    """How long an event waits until there is room for its function."""
    return float(event_settings(template, function)["MaximumEventAgeInSeconds"])


def event_settings(template: Template, function: str) -> Mapping[str, Any]:
    """How events of a function are treated."""
    logical = _logical_name(template, function)
    (settings,) = [
        resource["Properties"]
        for resource in template["Resources"].values()
        if resource["Type"] == "AWS::Lambda::EventInvokeConfig"
        and resource["Properties"]["FunctionName"] == {"Ref": logical}
    ]
    found: Mapping[str, Any] = settings
    return found


def allows_loops(template: Template, function: str) -> bool:
    """Whether a function may be invoked by what it has invoked."""
    properties = template["Resources"][_logical_name(template, function)]["Properties"]
    return bool(properties.get("RecursiveLoop", "Terminate") == "Allow")


def _logical_name(template: Template, function: str) -> str:
    (found,) = [
        name
        for name, resource in template["Resources"].items()
        if resource["Type"] == "AWS::Lambda::Function" and resource["Properties"]["FunctionName"] == function
    ]
    return str(found)
