"""EventBridge's side of scheduled rules: what they invoke when a minute has passed, if they may.

Rules and permissions are read from the template of their stack: moto forgets rules that an update of a stack adds.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any


def due_targets(template: Mapping[str, Any], variables: Mapping[str, str]) -> Iterator[tuple[str, bytes]]:
    """The functions that enabled rules invoke every minute, with their payloads; each must permit its rule to do so.

    `variables` are what the template's texts refer to.
    """
    resources: Mapping[str, Any] = template["Resources"]
    for name, rule in resources.items():
        if rule["Type"] != "AWS::Events::Rule" or rule["Properties"]["State"] != "ENABLED":
            continue
        assert rule["Properties"]["ScheduleExpression"] == "rate(1 minute)"
        for target in rule["Properties"]["Targets"]:
            function, attribute = target["Arn"]["Fn::GetAtt"]
            assert attribute == "Arn"
            assert any(_permits(permission, function, rule=name) for permission in resources.values())
            text = target["Input"]["Fn::Sub"]
            for variable, value in variables.items():
                text = text.replace(f"${{{variable}}}", value)
            yield resources[function]["Properties"]["FunctionName"], json.dumps(json.loads(text)).encode()


def _permits(permission: Mapping[str, Any], function: str, *, rule: str) -> bool:
    wanted = {
        "Action": "lambda:InvokeFunction",
        "FunctionName": {"Fn::GetAtt": [function, "Arn"]},
        "Principal": "events.amazonaws.com",
        "SourceArn": {"Fn::GetAtt": [rule, "Arn"]},
    }
    return bool(permission["Type"] == "AWS::Lambda::Permission" and permission["Properties"] == wanted)
