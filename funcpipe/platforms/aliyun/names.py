"""Names of the parts of a deployment on Alibaba Cloud, and the repository of its image."""

from funcpipe.errors import InvalidValue

_CLOUD, _PERSONAL, _ENTERPRISE = ".aliyuncs.com", ".personal.cr.aliyuncs.com", ".cr.aliyuncs.com"
WATCHDOG = "-watchdog"
"""The suffix of the name of the function that watches detached runs."""


def function_name(deployment: str, size: str) -> str:
    """Return the name of the function of a size."""
    return f"{deployment}-{size.replace('.', '_')}"


def watchdog_name(deployment: str) -> str:
    """Return the name of the function that watches detached runs."""
    return f"{deployment}{WATCHDOG}"


def bucket_name(deployment: str, account: str, region: str) -> str:
    """Return the name of a deployment's bucket; names of buckets are shared by all accounts."""
    return f"{deployment}-{account}-{region}"


def role_name(deployment: str, region: str) -> str:
    """Return the role of a deployment's functions, and its policy; roles are of all regions."""
    return f"{deployment}-functions-{region}"


def roles_of(deployment: str, region: str) -> tuple[str, ...]:
    """Return the possible names of a deployment's role; before 2026-11 it was one for all regions."""
    return role_name(deployment, region), f"{deployment}-functions"


def platform_url(deployment: str, region: str, *, endpoint: str | None = None, domain: str | None = None) -> str:
    """Return the URL by which `catalog.open_platform` opens a deployment."""
    options = {"endpoint": endpoint, "domain": domain}
    return f"aliyun-fc://{deployment}?region={region}" + "".join(f"&{k}={v}" for k, v in options.items() if v)


def storage_url(bucket: str, region: str, *, internal: bool) -> str:
    """Return the URL of runs' objects: over the network of the data centre for functions, from outside for clients."""
    return storage_at(bucket, region, oss_endpoint(region, internal=internal))


def storage_at(bucket: str, region: str, endpoint: str) -> str:
    """Return the URL of runs' objects by an endpoint of OSS."""
    return f"oss://{bucket}/runs?endpoint={endpoint}&region={region}"


def storage_by_domain(bucket: str, region: str, domain: str) -> str:
    """Return the URL of runs' objects by a custom domain of the bucket."""
    return f"oss://{bucket}/runs?domain={domain}&region={region}"


def oss_endpoint(region: str, *, internal: bool) -> str:
    """Return the endpoint of OSS in a region."""
    return f"https://oss-{region}{'-internal' if internal else ''}.aliyuncs.com"


def check_registry(repository: str, region: str, instance: str | None) -> None:
    """Raise InvalidValue for a repository of another region than the functions', or whose `instance` must be named.

    Addresses are crpi-ID.REGION.personal.cr.aliyuncs.com, of instances made before 2024-09 registry.REGION.aliyuncs.com
    or registry-intl.REGION.aliyuncs.com, and of the Enterprise Edition NAME-registry.REGION.cr.aliyuncs.com
    (alibabacloud.com/help/en/acr, 2026-03). Custom domains say nothing. Images are of the functions' region and account
    (alibabacloud.com/help/en/functioncompute, Create a Custom Container function, 2026-03), and those of the Enterprise
    Edition need the ID of their instance (CustomContainerConfig of the API of 2023-03-30, 2026-06).
    """
    host = repository.partition("/")[0]
    if not host.endswith(_CLOUD):
        return
    place = host.split(".")[1]
    if place != region:
        rule = f"must lie in {region}, where the functions are, not in {place}: make one there in Container Registry"
        raise InvalidValue("repository", repository, rule)
    if host.endswith(_ENTERPRISE) and not host.endswith(_PERSONAL) and instance is None:
        rule = (
            "is of the Enterprise Edition: name its instance, as the console shows it, with --registry-instance cri-…"
        )
        raise InvalidValue("repository", repository, rule)
