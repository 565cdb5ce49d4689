"""Alibaba Cloud's RAM for tests: roles, policies in versions, attachments, and what a role may do.

It is one for all regions of an account. After the documentation of CreateRole, CreatePolicy, CreatePolicyVersion,
DeletePolicy and their like (help.aliyun.com/en/ram/developer-reference, 2026-01).
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from tests.cloud_emulation.log_service import Answer

ACCOUNT = "1000"
PULLS = ("cr:GetRepository", "cr:GetRepositoryTag", "cr:PullRepository")
_MOST_VERSIONS, _MOST_BYTES = 5, 6144
_ROTATE = "DeleteOldestNonDefaultVersionWhenLimitExceeded"


@dataclass
class Policy:
    """The documents of a policy by their versions, oldest first, and the version that counts."""

    documents: dict[str, str]
    default: str = "v1"

    @property
    def document(self) -> str:
        return self.documents[self.default]


class Ram:
    """Roles with who may take them, custom policies, and the policies attached to roles."""

    def __init__(self) -> None:
        self.roles: dict[str, str] = {}
        self.policies: dict[str, Policy] = {}
        self.attached: dict[str, list[str]] = {}

    def inventory(self) -> list[str]:
        attached = [f"{role} has {policy}" for role, policies in self.attached.items() for policy in policies]
        return sorted(
            [*(f"Role {name}" for name in self.roles), *(f"Policy {name}" for name in self.policies), *attached]
        )

    def answer(self, call: str, query: Mapping[str, str]) -> Answer:
        """The answer to one call."""
        role, policy = query.get("RoleName", ""), query.get("PolicyName", "")
        if not re.fullmatch(r"[A-Za-z0-9.-]{0,64}", role):
            return _error(400, "InvalidParameter.RoleName.Length", role)
        if not re.fullmatch(r"[A-Za-z0-9-]{0,128}", policy):
            return _error(400, "InvalidParameter.PolicyName.InvalidChars", policy)
        if len(query.get("PolicyDocument", "").encode()) > _MOST_BYTES:
            return _error(400, "InvalidParameter.PolicyDocument.Length", f"more than {_MOST_BYTES} bytes")
        match call:
            case "CreateRole" | "GetRole" | "DeleteRole":
                return self._of_role(call, role, query)
            case "CreatePolicy" | "GetPolicy" | "DeletePolicy" | "CreatePolicyVersion":
                return self._of_policy(call, policy, query)
            case "AttachPolicyToRole" | "DetachPolicyFromRole" | "ListPoliciesForRole":
                return self._of_attachment(call, role, policy)
            case _:
                return _error(404, "InvalidAction.NotFound", call)

    def missing_to_pull(self, role_arn: str, image: str, region: str) -> str | None:
        """What the function of a role is refused that needs `image`, by the policy AliyunFCDefaultRole has for that.

        Tokens are of the whole registry: alibabacloud.com/help/en/doc-detail/144948.htm. None if nothing is.
        """
        role = role_arn.rpartition("/")[2]
        if "fc.aliyuncs.com" not in self.roles.get(role, ""):
            return f"the role {role_arn} cannot be assumed"
        repository = image.partition("/")[2].rpartition(":")[0]
        resource = f"acs:cr:{region}:{ACCOUNT}:repository/{repository}"
        for action, on in [("cr:GetAuthorizationToken", "*"), *((action, resource) for action in PULLS)]:
            if not self.allows(role, action, on):
                return f"the caller is not authorized to perform '{action}' on resource '{on}'"
        return None

    def statements(self, role: str) -> list[dict[str, Any]]:
        """The statements of all policies of a role."""
        return [
            statement
            for policy in self.attached.get(role, ())
            for statement in json.loads(self.policies[policy].document)["Statement"]
        ]

    def allows(self, role: str, action: str, resource: str, prefix: str = "") -> bool:
        """Whether a statement lets the role do so; listings of objects are of those below a `prefix`."""
        return any(
            statement["Effect"] == "Allow"
            and _holds(statement.get("Condition", {}), prefix)
            and any(fnmatchcase(action, pattern) for pattern in statement["Action"])
            and any(fnmatchcase(resource, pattern) for pattern in statement["Resource"])
            for statement in self.statements(role)
        )

    def _of_role(self, call: str, role: str, query: Mapping[str, str]) -> Answer:
        creates = call == "CreateRole"
        if creates == (role in self.roles):
            return _exists("Role") if creates else _missing("Role")
        if call == "DeleteRole":
            if self.attached.get(role):
                return _error(409, "DeleteConflict.Role.Policy", "the role has policies")
            del self.roles[role]
            self.attached.pop(role, None)
        elif creates:
            self.roles[role] = query["AssumeRolePolicyDocument"]
        return Answer(200, {"Role": {"RoleName": role, "Arn": f"acs:ram::{ACCOUNT}:role/{role}"}})

    def _of_policy(self, call: str, name: str, query: Mapping[str, str]) -> Answer:
        creates = call == "CreatePolicy"
        if creates == (name in self.policies):
            return _exists("Policy") if creates else _missing("Policy")
        if creates:
            self.policies[name] = Policy({"v1": query["PolicyDocument"]})
        policy = self.policies[name]
        if call == "DeletePolicy":
            return self._delete_policy(name, cascading=query.get("CascadingDelete") == "true")
        if call == "CreatePolicyVersion":
            return _add_version(policy, query)
        version: dict[str, Any] = {"VersionId": policy.default, "PolicyDocument": policy.document}
        return Answer(200, {"Policy": {"PolicyName": name}, "DefaultPolicyVersion": version})

    def _delete_policy(self, name: str, *, cascading: bool) -> Answer:
        if any(name in policies for policies in self.attached.values()):
            return _error(409, "DeleteConflict.Policy.Role", "the policy is attached")
        if len(self.policies[name].documents) > 1 and not cascading:
            return _error(409, "DeleteConflict.Policy.Version", "the policy has more than one version")
        del self.policies[name]
        return Answer(200, {})

    def _of_attachment(self, call: str, role: str, policy: str) -> Answer:
        if role not in self.roles:
            return _missing("Role")
        attached = self.attached.get(role, [])
        if call == "ListPoliciesForRole":
            return Answer(200, {"Policies": {"Policy": [{"PolicyName": name} for name in attached]}})
        if policy not in self.policies:
            return _missing("Policy")
        attaches = call == "AttachPolicyToRole"
        if attaches == (policy in attached):
            return _exists("Role.Policy") if attaches else _missing("Role.Policy")
        left = [*attached, policy] if attaches else [name for name in attached if name != policy]
        self.attached[role] = left
        return Answer(200, {})


def _holds(condition: Mapping[str, Mapping[str, list[str]]], prefix: str) -> bool:
    """Whether the condition of a statement holds: none, or that a prefix is one of those named."""
    assert condition.keys() <= {"StringLike"}
    patterns = condition.get("StringLike", {"oss:Prefix": ["*"]})
    return any(fnmatchcase(prefix, pattern) for pattern in patterns["oss:Prefix"])


def _add_version(policy: Policy, query: Mapping[str, str]) -> Answer:
    if len(policy.documents) == _MOST_VERSIONS:
        if query.get("RotateStrategy") != _ROTATE:
            return _error(409, "LimitExceeded.Policy.Version", f"a policy has at most {_MOST_VERSIONS} versions")
        del policy.documents[next(version for version in policy.documents if version != policy.default)]
    version = f"v{1 + max(int(version[1:]) for version in policy.documents)}"
    policy.documents[version] = query["PolicyDocument"]
    if query.get("SetAsDefault") == "true":
        policy.default = version
    return Answer(200, {"PolicyVersion": {"VersionId": version, "IsDefaultVersion": policy.default == version}})


def _exists(kind: str) -> Answer:
    return _error(409, f"EntityAlreadyExists.{kind}", "it exists")


def _missing(kind: str) -> Answer:
    return _error(404, f"EntityNotExist.{kind}", "it is not there")


def _error(status: int, code: str, message: str) -> Answer:
    return Answer(status, {"Code": code, "Message": message})
