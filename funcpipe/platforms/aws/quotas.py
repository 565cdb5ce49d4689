"""Quotas of which new accounts have little, and the requests for more of them.

docs.aws.amazon.com/lambda/latest/dg/gettingstarted-limits.html and codebuild/latest/userguide/limits.html, 2026-11;
the codes are those that Service Quotas has.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from funcpipe.platforms.shared.capacity import Capacity

_USUAL_FUNCTIONS = 1000
_NEW_MB = 3008


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """A quota of an account in a region."""

    service: str
    code: str
    name: str

    def request(self, wanted: int, region: str) -> str:
        """Return the advice to raise it."""
        return (
            f"request {wanted} of the quota '{self.name}': aws service-quotas request-service-quota-increase "
            f"--service-code {self.service} --quota-code {self.code} --desired-value {wanted} --region {region}"
        )


CONCURRENCY = Quota(service="lambda", code="L-B99A9384", name="Concurrent executions")
BUILDS = Quota(service="codebuild", code="L-2DC20C30", name="Concurrently running builds for Linux/Medium environment")


def account_capacity(needed: int, unreserved: int, region: str) -> Capacity:
    """Return the capacity of the functions that share what no function of the account has reserved."""
    return Capacity(
        needed=needed,
        allowed=unreserved,
        limit=f"this account may run {unreserved} in {region}",
        fewer="plan with --max-functions",
        more=lambda wanted: CONCURRENCY.request(wanted, region),
    )


def reserved_capacity(name: str, needed: int, reserved: int, region: str) -> Capacity:
    """Return the capacity of a function with reserved concurrency."""
    return Capacity(
        needed=needed,
        allowed=reserved,
        limit=f"{name} may run {reserved} times, its reserved concurrency in {region}",
        more=lambda wanted: (
            f"reserve {wanted}: aws lambda put-function-concurrency --function-name {name} "
            f"--reserved-concurrent-executions {wanted} --region {region}"
        ),
    )


def notices(functions: int, memory_mb: tuple[int, ...], region: str) -> Iterator[str]:
    """Yield warnings about functions of these sizes in an account that may run so many at once."""
    if functions >= _USUAL_FUNCTIONS:
        return
    yield (
        f"this account may run {functions} functions at once in {region}: plan with --max-functions {functions}, "
        f"or {CONCURRENCY.request(_USUAL_FUNCTIONS, region)}"
    )
    large = [str(memory) for memory in memory_mb if memory > _NEW_MB]
    if large:
        yield (
            f"accounts with so few often admit functions of at most {_NEW_MB} MB, which no quota tells: if those of "
            f"{', '.join(large)} MB fail, plan with --max-memory {_NEW_MB}, or ask AWS Support for more in {region}"
        )
