"""The platforms and markets that funcpipe knows by name, their regions and storage, and those read from files."""

import contextlib
import functools
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import resources
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, quote, unquote, urlsplit

from funcpipe.core import ModelProfile, Plan, PlatformSpec, from_text, read
from funcpipe.core.backoff import Backoff
from funcpipe.core.distribution import needed_from
from funcpipe.core.market import Market
from funcpipe.core.platform import RegionTable, in_region
from funcpipe.core.stores import DEFAULT, KINDS, urls_by_kind
from funcpipe.core.texts import url_parts, without_secrets
from funcpipe.errors import InputError, InvalidValue
from funcpipe.platforms.base import SHARE, Deployment, Platform, RequestMeter, Storage
from funcpipe.platforms.gpus import usable_gpus
from funcpipe.platforms.local.files import FileStorage
from funcpipe.platforms.local.throttle import read_link
from funcpipe.platforms.process import usable_memory_bytes, usable_processors
from funcpipe.platforms.room import Node, Offer, of_nodes
from funcpipe.platforms.wrappers import PAUSES, RETRY_S, Counted, Retried, Routed, Timed

if TYPE_CHECKING:
    from funcpipe.platforms.ray.cluster import RayAddress

LOCAL = "local"
_RAY = "ray"
_RUN = (LOCAL, _RAY, "aws-lambda", "aliyun-fc")
_OSS_OPTIONS = ({"endpoint", "region"}, {"domain", "region"})


def spec_names() -> tuple[str, ...]:
    """Return the platforms whose specification ships with funcpipe."""
    files = resources.files("funcpipe.platforms").joinpath("specs").iterdir()
    return tuple(sorted(file.name.removesuffix(".json") for file in files if file.name.endswith(".json")))


def load_spec(name: str) -> PlatformSpec:
    """Return the specification called `name`, or the one in the file of that path.

    A name with a region, as in `aws-lambda?region=eu-central-1`, or the URL of a deployment that says its region, gives
    the prices and limits of that region, as far as they are known (`PlatformSpec.prices_note`). The URL of a Ray
    cluster, to which this connects, gives the sizes that fit on its nodes.
    """
    if name in spec_names():
        return _shipped(name)
    if os.path.exists(name):
        return read(PlatformSpec, name)
    if is_ray(name):
        return offer_at(name).spec
    parts = urlsplit(name)
    scheme, region = parts.scheme or parts.path, url_region(name)
    if scheme in region_tables() and (region or parts.netloc):
        return priced_in(_shipped(scheme), region)
    rule = f"must be one of {', '.join(spec_names())}, with ?region=REGION if wanted, or a specification's file"
    raise InvalidValue("platform", name, rule)


def names_spec(text: str) -> bool:
    """Return True if `text` is the name of a platform, with or without a region, and no file."""
    parts = urlsplit(text)
    return not os.path.exists(text) and (parts.scheme or parts.path) in spec_names()


def planned_spec(plan: Plan) -> PlatformSpec:
    """Return the specification that `plan` was made for, in its region."""
    return priced_in(load_spec(plan.platform), plan.region)


def profiled_spec(profile: ModelProfile) -> PlatformSpec:
    """Return the specification that `profile` was measured for, with the sizes that it was measured on."""
    spec = load_spec(profile.platform)
    sizes = tuple(size for size in spec.sizes if size.name in profile.sizes)
    return replace(spec, sizes=sizes or spec.sizes)


def url_region(url: str) -> str | None:
    """Return the region that the URL of a deployment names, if it does."""
    return url_parts("platform", url)[1].get("region")


def url_share(url: str) -> float | None:
    """Return what functions cost that the platform at `url` keeps ready, as a share of their price; None on demand."""
    share = url_parts("platform", url)[1].get(SHARE)
    if share is None:
        return None
    try:
        return float(share)
    except ValueError:
        raise InvalidValue("platform", url, f"must have a number for {SHARE}") from None


def with_region(platform: str) -> str:
    """`platform`, where a deployment's URL that names no region gets the one that this machine is set to, if any."""
    scheme, _, rest = platform.partition("://")
    if scheme not in region_tables() or url_region(platform):
        return platform
    with contextlib.suppress(InputError), needed_from("aws" if scheme.startswith("aws") else "aliyun"):
        region = os.environ.get("ALIBABA_CLOUD_REGION")
        if scheme.startswith("aws"):
            from funcpipe.platforms.aws.account import Account

            region = Account().region
        return f"{platform}{'&' if '?' in rest else '?'}region={region}" if region else platform
    return platform


def _shipped(name: str) -> PlatformSpec:
    text = resources.files("funcpipe.platforms").joinpath("specs", f"{name}.json").read_text(encoding="utf-8")
    spec = from_text(PlatformSpec, text, source=f"{name}.json")
    return of_nodes(spec, [_this_machine()], shared_cores=usable_processors()) if name == LOCAL else spec


def _this_machine() -> Node:
    """This machine, whose processors all functions share, as many as there are."""
    return Node(cpus=math.inf, memory_bytes=usable_memory_bytes(), gpus=usable_gpus())


def _check_runs(platform: str) -> None:
    """Raise InvalidValue for a platform whose specification ships, but which has no implementation."""
    parts = urlsplit(platform)
    scheme = parts.scheme or parts.path
    if scheme in spec_names() and scheme not in _RUN:
        raise InvalidValue(
            "platform", without_secrets(platform), "can be planned for, but functions do not run on it yet"
        )


def offer_at(platform: str) -> Offer:
    """What a platform that functions run on offers now: on machines at hand, no more than what these have room for.

    Connects to Ray, or starts it, where functions are tasks of Ray.
    """
    if is_ray(platform):
        address, spec = ray_cluster(platform)
        from funcpipe.platforms.ray.platform import ray_functions

        with ray_functions(address, spec) as cluster:
            return cluster.offer
    _check_runs(platform)
    spec = load_spec(with_region(platform))
    return Offer(spec=spec, nodes=(_this_machine(),) if platform == LOCAL else None)


FIRST_S = 15.0
"""The time that a storage may take to answer first, where it is not known to exist."""


def open_storage(
    url: str,
    *,
    retry_s: float = RETRY_S,
    first_s: float | None = FIRST_S,
    meter: RequestMeter | None = None,
    crowd_s: float | None = None,
) -> Storage:
    """The object storage at `url`: `file:///folder`, or `s3://bucket/prefix` with `?endpoint=…&region=…` as needed.

    Or `oss://bucket/prefix?endpoint=…&region=…`, where `domain=…` may stand for `endpoint`: a custom domain of the
    bucket. Or `redis://host:port/database?prefix=…`, a Valkey or Redis server, and `rediss://` with TLS. Credentials
    come from the environment, never from the URL. A fragment describes the link that is imposed, see `link.py`.
    Objects of some kinds may lie elsewhere: `default=URL,messages=URL,sums=URL,checkpoints=URL`. A request
    that fails for now is tried again for `retry_s`, and for `first_s` until the storage has answered once, unless it is
    None: then it is known to be there. All who ask the storage at once can be served in `crowd_s`, if that is known.
    `meter` counts each try that costs something.
    """
    backoff = replace(PAUSES, crowd_s=crowd_s)
    if (urls := urls_by_kind(url)).keys() != {DEFAULT}:
        kinds: dict[str, list[str]] = {}
        for kind in (DEFAULT, *KINDS):
            kinds.setdefault(urls.get(kind, urls[DEFAULT]), []).append(kind)
        opened = {one: _open_one(one, retry_s, first_s, backoff, meter, kinds[one]) for one in sorted(kinds)}
        return Routed({kind: opened[one] for kind, one in urls.items()})
    return _open_one(urls[DEFAULT], retry_s, first_s, backoff, meter, (DEFAULT, *KINDS))


def _open_one(
    url: str,
    retry_s: float,
    first_s: float | None,
    backoff: Backoff,
    meter: RequestMeter | None,
    kinds: Sequence[str],
) -> Storage:
    """Return the storage at one `url`, where objects of `kinds` lie."""
    parts, options = _storage_parts(url)
    store = _open_unretried(url, parts, options)
    counted = store if meter is None else Counted(store, meter, kinds=kinds)
    timed = Timed(counted, parts._replace(fragment="").geturl())
    store = Retried(timed, deadline_s=retry_s, first_s=first_s, backoff=backoff)
    return read_link(parts.fragment).impose(store) if parts.fragment else store


def _storage_parts(url: str) -> tuple[SplitResult, dict[str, str]]:
    is_redis = _is_redis(url.partition("://")[0])
    where = "REDIS_USERNAME and REDIS_PASSWORD of the environment" if is_redis else "the environment"
    return url_parts("storage", url, credentials=where)


def _open_unretried(url: str, parts: SplitResult, options: Mapping[str, str]) -> Storage:
    match parts.scheme:
        case "file" if parts.path and not parts.netloc and not options:
            return FileStorage(unquote(parts.path))
        case "s3" if parts.netloc and options.keys() <= {"endpoint", "region"} and all(options.values()):
            with needed_from("aws"):
                from funcpipe.platforms.aws.s3 import S3Storage

            return S3Storage(
                parts.netloc, unquote(parts.path), endpoint=options.get("endpoint"), region=options.get("region")
            )
        case "oss" if parts.netloc and options.keys() in _OSS_OPTIONS and all(options.values()):
            with needed_from("aliyun"):
                from funcpipe.platforms.aliyun.oss import OssStorage

            cname, region = "domain" in options, options["region"]
            endpoint = options["domain" if cname else "endpoint"]
            return OssStorage(parts.netloc, unquote(parts.path), endpoint=endpoint, region=region, cname=cname)
        case scheme if _is_redis(scheme) and parts.hostname and options.keys() <= {"prefix"} and all(options.values()):
            return _open_redis(url, parts, options.get("prefix", ""))
        case _:
            raise _no_storage(url, parts)


def _open_redis(url: str, parts: SplitResult, prefix: str) -> Storage:
    try:
        database, port = int(parts.path.strip("/") or 0), parts.port
    except ValueError:
        raise _no_storage(url, parts) from None
    with needed_from("redis"):
        from funcpipe.platforms.redis import DEFAULT_PORT, RedisStorage

    return RedisStorage(
        parts.hostname or "", port or DEFAULT_PORT, database=database, prefix=prefix, tls=parts.scheme == "rediss"
    )


def _no_storage(url: str, parts: SplitResult) -> InvalidValue:
    printed = without_secrets(url)
    return InvalidValue("storage", printed, _storage_rule(parts.scheme, printed))


def _storage_rule(scheme: str, url: str) -> str:
    """Return the form that the URL of a storage must have, for a user who has written `url`."""
    match scheme:
        case "oss":
            return "must read oss://BUCKET/PREFIX?endpoint=oss-REGION.aliyuncs.com&region=REGION"
        case "s3":
            return "must read s3://BUCKET/PREFIX, where ?region=REGION&endpoint=URL may follow"
        case "redis" | "rediss":
            return f"must read {scheme}://HOST:PORT/DATABASE, where DATABASE is a number and ?prefix=PREFIX may follow"
        case "file":
            return "must read file:///FOLDER, with three slashes before an absolute path"
        case "" if url:
            return f"must be a URL, such as file://{quote(os.path.abspath(url))} or s3://bucket/prefix"
        case _:
            return (
                "must be a URL such as file:///tmp/objects, s3://bucket/prefix, "
                "oss://bucket/prefix?endpoint=…&region=… or redis://host:6379/0?prefix=…"
            )


def is_ray(platform: str) -> bool:
    """Return True if functions of `platform` are tasks of Ray: `ray`, or a URL such as `ray://auto`."""
    return platform.partition("://")[0] == _RAY


def places_of(platform: str) -> tuple[str, ...]:
    """Return the platforms that a text with commas between them names, each once."""
    return tuple(dict.fromkeys(filter(None, map(str.strip, platform.split(",")))))


def is_deployment(platform: str) -> bool:
    """Return True if `platform` is a deployment by `funcpipe deploy`, with a storage of its own."""
    return platform != LOCAL and not is_ray(platform)


def ray_cluster(url: str) -> "tuple[RayAddress, PlatformSpec]":
    """The cluster that the URL names, and its specification, with the prices of the machine that the URL may name."""
    from funcpipe.platforms.ray.cluster import at_prices_of, parse_address

    address, spec = parse_address(url), load_spec(_RAY)
    if address.machine is None or address.market is None:
        return address, spec
    return address, at_prices_of(spec, load_market(address.market), address.machine, spot=address.spot)


def open_platform(url: str, *, meter: RequestMeter | None = None) -> Platform:
    """The platform whose `url` this is, such as `local:///folder/socket`: in its client's process, or in a function.

    `meter` counts what it asks of its own storage, as `open_deployment` says.
    """
    if is_ray(url):
        address, spec = ray_cluster(url)
        from funcpipe.platforms.ray.platform import RayPlatform

        return RayPlatform(address, spec)
    if urlsplit(url).scheme != LOCAL:
        return open_deployment(url, meter=meter)
    from funcpipe.platforms.local.platform import LocalPlatform  # which not every function needs

    return LocalPlatform(url)


def open_deployment(url: str, *, meter: RequestMeter | None = None, known: PlatformSpec | None = None) -> Deployment:
    """Open a deployment of `funcpipe deploy`: `aws-lambda://NAME?region=…` or `aliyun-fc://NAME?region=…`.

    A bare scheme stands for the name funcpipe in the environment's region. An `endpoint` in a URL of Alibaba Cloud
    stands for all its services; for AWS the environment's AWS_ENDPOINT_URL does. A `domain` there is a custom domain of
    the bucket, by which clients reach it. `meter` counts what it asks of its bucket to watch and stop functions.
    Function Compute does not report how many functions an account may run at once: `known` may.
    """
    _check_runs(url)
    parts, options = url_parts("platform", url if "://" in url else f"{url}://funcpipe")
    match parts.scheme:
        case "aws-lambda" if parts.netloc and not parts.path and options.keys() <= {"region", SHARE}:
            with needed_from("aws"):
                from funcpipe.platforms.aws import account as aws
                from funcpipe.platforms.aws.functions import AwsPlatform

            aws_account = aws.Account(region=options.get("region"))
            spec = priced_in(load_spec(parts.scheme), aws_account.region)
            return AwsPlatform(spec, aws_account, deployment=parts.netloc, meter=meter, share=url_share(url))
        case "aliyun-fc" if parts.netloc and not parts.path and options.keys() <= {"region", "endpoint", "domain"}:
            with needed_from("aliyun"):
                from funcpipe.platforms.aliyun import account as aliyun
                from funcpipe.platforms.aliyun.functions import AliyunPlatform

            domain, account = options.pop("domain", None), aliyun.Account(**options)
            spec = priced_in(with_gpu_instances(load_spec(parts.scheme)), account.region)
            spec = spec if known is None else replace(spec, max_functions=known.max_functions)
            return AliyunPlatform(spec, account, deployment=parts.netloc, domain=domain)
        case _:
            raise InvalidValue(
                "platform",
                without_secrets(url),
                "must be local, ray://…, or a deployment such as aws-lambda://funcpipe?region=eu-central-1",
            )


def with_gpu_instances(spec: PlatformSpec) -> PlatformSpec:
    """Return `spec` with the sizes of the specification of the same platform's functions with GPUs, if there is one."""
    name = f"{spec.name}-gpu"
    more = _shipped(name).sizes if name in spec_names() else ()
    return replace(spec, sizes=tuple(sorted((*spec.sizes, *more), key=lambda size: size.memory_mb)))


def _is_redis(scheme: str) -> bool:
    return scheme in ("redis", "rediss")


def market_names() -> tuple[str, ...]:
    """Return the markets that ship with funcpipe; those with a year reproduce a paper."""
    files = resources.files("funcpipe.platforms").joinpath("specs", "machines").iterdir()
    return tuple(sorted(file.name.removesuffix(".json") for file in files if file.name.endswith(".json")))


def load_market(name: str) -> Market:
    """Return the market called `name`, or the one in the file of that path."""
    if name not in market_names():
        if os.path.exists(name):
            return read(Market, name)
        raise InvalidValue("market", name, f"must be one of {', '.join(market_names())}, or a market's file")
    folder = resources.files("funcpipe.platforms").joinpath("specs", "machines")
    return from_text(Market, folder.joinpath(f"{name}.json").read_text(encoding="utf-8"), source=f"{name}.json")


@functools.cache
def region_tables() -> dict[str, RegionTable]:
    """Return the table of each platform that has one, by the name of its specification."""
    folder = resources.files("funcpipe.platforms").joinpath("specs", "regions")
    files = sorted(file.name for file in folder.iterdir() if file.name.endswith(".json"))
    texts = {name: folder.joinpath(name).read_text(encoding="utf-8") for name in files}
    tables = [from_text(RegionTable, text, source=name) for name, text in texts.items()]
    return {platform: table for table in tables for platform in table.platforms}


def priced_in(spec: PlatformSpec, region: str | None) -> PlatformSpec:
    """Return `spec` with the prices and limits of `region`, as far as they are known; unchanged without a region."""
    return spec if not region else in_region(spec, region, region_tables().get(spec.name))
