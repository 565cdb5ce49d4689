"""An AWS account for tests: moto's control plane, and functions that really run in AWS's runtime client.

A proxy stands in front of moto. Invocations go to execution environments (`lambda_runtime`), builds unpack their
archive and put an image into moto's registry, everything else goes through. What moto leaves out is taken from the
stack's own template: retries, destinations, log groups. The proxy counts calls and can make any of them fail.
"""

import http.client
import json
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import boto3

from tests.cloud_emulation import lineage
from tests.cloud_emulation.account_limits import AccountLimits
from tests.cloud_emulation.aws_errors import Answer, json_error, print_error, refusal
from tests.cloud_emulation.events import due_targets
from tests.cloud_emulation.function_states import REJECTED, FunctionStates
from tests.cloud_emulation.images import unpack
from tests.cloud_emulation.lambda_logs import check_filter, write_failure, write_log
from tests.cloud_emulation.lambda_runtime import REGION, Environment, Function, Invocation
from tests.cloud_emulation.moto import moto_endpoint
from tests.cloud_emulation.processes import Start, in_clean_folder
from tests.cloud_emulation.provisioned import Provisioned
from tests.cloud_emulation.service_models import read_once
from tests.cloud_emulation.stack_templates import allows_loops, event_settings, oldest_s, retries

_INVOKE = re.compile(r"/2015-03-31/functions/([\w-]+)/invocations")
_CONFIGURATION = re.compile(r"/2015-03-31/functions/([\w-]+)/configuration")
_EVENTS = re.compile(r"GET /2019-09-25/functions/([\w-]+)/event-invoke-config")
_READS = ("Get", "List", "Describe", "BatchGet", "Filter", "Head", "GET", "HEAD", "LIST")
_HOP_BY_HOP = {"connection", "transfer-encoding", "content-length", "server", "date"}


class AwsCloud(ThreadingHTTPServer):
    """The account; `calls` holds the name of each request, `chains` of each invocation which one it is of its chain.

    `refuse` may answer a call with an error's code; if `effective`, the call has had its effect nevertheless, as when
    the answer to it is lost.
    """

    daemon_threads = True
    request_queue_size = 128  # or connections that come at once are reset while this machine is busy

    def __init__(self, moto: str, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.moto = moto
        self.folder = folder
        self.start: Start = in_clean_folder
        read_once()
        self._session = boto3.session.Session(aws_access_key_id="test", aws_secret_access_key="test")
        self._clients: dict[str, Any] = {}
        self.environments: list[Environment] = []
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(32)
        self._running: list[Future[None]] = []
        self.forget()

    def forget(self) -> None:
        """End what runs, and forget what it has been told and what it has noted; what is in the account stays."""
        while not all(running.done() for running in self._running):
            for environment in list(self.environments):
                environment.close()
            wait(self._running, timeout=0.1)
        for environment in self.environments:
            environment.close()
        self._running.clear()
        self.calls: list[str] = []
        self.refuse: Callable[[str], str | None] = lambda call: None
        self.effective = False
        self.lines: list[str] = []
        self.environment: dict[str, str] = {"AWS_ENDPOINT_URL": self.moto}
        self.timeout_s: float | None = None
        self.limits = AccountLimits()
        self.states = FunctionStates()
        self.provisioned = Provisioned()
        self.chains: list[int] = []
        self._builds: dict[str, str] = {}
        self.idle: list[Environment] = []
        self.environments = []

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def changes(self) -> list[str]:
        """The calls that change something."""
        return [call for call in self.calls if not call.startswith(_READS)]

    def client(self, service: str) -> Any:
        """A client of moto itself, past the proxy."""
        with self._lock:
            if service not in self._clients:
                self._clients[service] = self._session.client(service, endpoint_url=self.moto, region_name=REGION)
            return self._clients[service]

    def reserve(self, name: str, concurrency: int) -> None:
        """Reserve concurrency for a function, which then has no more."""
        self.client("lambda").put_function_concurrency(FunctionName=name, ReservedConcurrentExecutions=concurrency)
        self.limits.reserved[name] = concurrency

    def invoke(self, name: str, payload: bytes, trace: str | None = None, alias: str | None = None) -> str:
        """Invoke a function, or what its `alias` names; `trace` is the header of who asks for it.

        Returns the request's name.
        """
        invocation = Invocation(request_id=str(uuid.uuid4()), payload=payload, trace=lineage.longer(trace))
        self.chains.append(lineage.length(invocation.trace))
        running = self._pool.submit(self._run, name, invocation, alias)
        running.add_done_callback(print_error)
        self._running.append(running)
        return invocation.request_id

    def event_settings(self, name: str) -> dict[str, Any]:
        """How events of a function are treated, as the template of its stack says."""
        template, stack = self._template(name)
        bucket = f"arn:aws:s3:::{self._physical(stack, 'Bucket')}"
        return dict(event_settings(template, name)) | {"DestinationConfig": {"OnFailure": {"Destination": bucket}}}

    def pass_a_minute(self, stack: str) -> list[str]:
        """What the rules of a stack invoke; the names of the invocations."""
        template = self.client("cloudformation").get_template(StackName=stack)["TemplateBody"]
        variables = {"Bucket": self._physical(stack, "Bucket"), "AWS::Region": REGION}
        return [self.invoke(name, payload) for name, payload in due_targets(template, variables)]

    def start_build(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """What the template's buildspec does, with the unpacked archive as the image."""
        bucket, _, key = request["sourceLocationOverride"].partition("/")
        (image,) = [v["value"] for v in request["environmentVariablesOverride"] if v["name"] == "IMAGE"]
        archive = self.client("s3").get_object(Bucket=bucket, Key=key)["Body"].read()
        self.keep_image(image, archive)
        build = f"{request['projectName']}:{uuid.uuid4()}"
        self._builds[build] = "SUCCEEDED"
        return {"build": {"id": build, "buildStatus": "IN_PROGRESS"}}

    def keep_image(self, image: str, archive: bytes) -> None:
        repository, tag = image.rpartition("/")[2].split(":")
        unpack(archive, self.folder / tag)
        manifest = {"schemaVersion": 2, "config": {"digest": f"sha256:{tag * 2}"}, "layers": []}
        manifest["mediaType"] = "application/vnd.docker.distribution.manifest.v2+json"
        self.client("ecr").put_image(repositoryName=repository, imageTag=tag, imageManifest=json.dumps(manifest))

    def builds(self, request: Mapping[str, Any]) -> dict[str, Any]:
        return {"builds": [{"id": build, "buildStatus": self._builds[build]} for build in request["ids"]]}

    def empty_repositories(self, stack: str) -> None:
        """What CloudFormation does, and moto does not, to a repository with EmptyOnDelete."""
        template: dict[str, Any] = self.client("cloudformation").get_template(StackName=stack)["TemplateBody"]
        for resource in template["Resources"].values():
            if resource["Type"] == "AWS::ECR::Repository" and resource["Properties"].get("EmptyOnDelete"):
                name = resource["Properties"]["RepositoryName"]
                images = self.client("ecr").list_images(repositoryName=name)["imageIds"]
                if images:
                    self.client("ecr").batch_delete_image(repositoryName=name, imageIds=images)

    def close(self) -> None:
        self.shutdown()
        for environment in self.environments:
            environment.close()
        self._pool.shutdown(cancel_futures=True)
        self.server_close()

    def _run(self, name: str, invocation: Invocation, alias: str | None) -> None:
        template, stack = self._template(name)
        own = None if alias is None else self.provisioned.event_settings(name, alias)
        tries = 1 + (retries(template, name) if own is None else own["MaximumRetryAttempts"])
        oldest = oldest_s(template, name) if own is None else own["MaximumEventAgeInSeconds"]
        if lineage.length(invocation.trace) > lineage.LONGEST and not allows_loops(template, name):
            self._write_failure(stack, name, invocation, lineage.DROPPED)
        elif not self.limits.wait_for_room(name, oldest):
            self._write_failure(stack, name, invocation, b"null", "EventAgeExceeded")
        else:
            try:
                self._serve(name, invocation, stack, alias, tries=tries)
            finally:
                self.limits.leave(name)

    def _serve(self, name: str, invocation: Invocation, stack: str, alias: str | None, *, tries: int) -> None:
        if alias is None:
            self._try(self._function(name), invocation, stack, tries=tries)
            return
        is_ready = self.provisioned.enter(name, alias)
        try:
            self._try(self._function(name, alias, is_ready), invocation, stack, tries=tries)
        finally:
            if is_ready:
                self.provisioned.leave(name, alias)

    def _try(self, function: Function, invocation: Invocation, stack: str, *, tries: int) -> None:
        for _ in range(tries):
            attempt = replace(invocation, ended=threading.Event())
            environment = self._environment(function)
            began_ms = int(time.time() * 1000)
            environment.run(attempt)
            group = self._physical(stack, "Logs")
            write_log(self.client("logs"), group, environment, attempt, began_ms)
            if environment.alive:
                with self._lock:
                    self.idle.append(environment)
            if attempt.status == "success":
                return
        if function.alias is None or "DestinationConfig" in self.provisioned.event_settings(
            function.name, function.alias
        ):
            self._write_failure(stack, function.name, attempt, attempt.answer)

    def _environment(self, function: Function) -> Environment:
        with self._lock:
            for environment in self.idle:
                if environment.function == function and environment.alive:
                    self.idle.remove(environment)
                    return environment
        environment = Environment(function, self.lines.append, self.start)
        self.environments.append(environment)
        return environment

    def _function(self, name: str, alias: str | None = None, kept_ready: bool = False) -> Function:
        functions, version = self.client("lambda"), "$LATEST"
        if alias is not None:
            version = functions.get_alias(FunctionName=name, Name=alias)["FunctionVersion"]
        found = functions.get_function(FunctionName=name, Qualifier=version)
        settings, tag = found["Configuration"], found["Code"]["ImageUri"].rpartition(":")[2]
        begin = (self.folder / tag / "Dockerfile").read_text().splitlines()[-1]
        words = json.loads(begin.removeprefix("ENTRYPOINT "))
        assert words[:3] == ["python", "-m", "awslambdaric"]
        return Function(
            name=name,
            image=self.folder / tag,
            handler=words[3],
            memory_mb=settings["MemorySize"],
            timeout_s=self.timeout_s or settings["Timeout"],
            version=version,
            alias=alias,
            kept_ready=kept_ready,
            environment={
                **settings["Environment"]["Variables"],
                "AWS_ACCESS_KEY_ID": settings["Role"].rpartition("/")[2],  # by which a proxy knows whose requests are
                "AWS_SECRET_ACCESS_KEY": "test",
                **self.environment,
            },
        )

    def _template(self, function: str) -> tuple[dict[str, Any], str]:
        """The template of the stack that made a function, and the stack's name."""
        stack = function.rpartition("-")[0]
        found: dict[str, Any] = self.client("cloudformation").get_template(StackName=stack)["TemplateBody"]
        return found, stack

    def _physical(self, stack: str, logical: str) -> str:
        answer = self.client("cloudformation").describe_stack_resource(StackName=stack, LogicalResourceId=logical)
        return str(answer["StackResourceDetail"]["PhysicalResourceId"])

    def _write_failure(self, stack: str, *record: Any) -> None:
        write_failure(self.client("s3"), self._physical(stack, "Bucket"), *record)


class _Handler(BaseHTTPRequestHandler):
    server: AwsCloud
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        call = self._call(body)
        self.server.calls.append(call)
        code = self.server.refuse(call)
        if code is None:
            self._do(call, body, self._answer)
            return
        if self.server.effective:
            self._do(call, body, lambda *_: None)
        self._answer(*refusal(code, self.headers, self.path))

    do_POST = do_PUT = do_DELETE = do_HEAD = do_PATCH = do_GET

    def _do(self, call: str, body: bytes, answer: Callable[..., None]) -> None:
        if match := _INVOKE.fullmatch(urlsplit(self.path).path):
            assert self.headers["X-Amz-Invocation-Type"] == "Event"
            if not self.server.states.admits(match[1]):
                answer(*json_error(409, *REJECTED))
                return
            alias = parse_qs(urlsplit(self.path).query).get("Qualifier", [None])[0]
            request = self.server.invoke(match[1], body, self.headers["X-Amzn-Trace-Id"], alias)
            answer(202, b"", {"x-amzn-RequestId": request})
        elif (limited := self.server.limits.answer(call, body)) is not None:
            answer(*limited)
        elif (kept := self._of_provisioned(call, body)) is not None:
            answer(*kept)
        elif call == "StartBuild":
            answer(200, json.dumps(self.server.start_build(json.loads(body))).encode())
        elif call == "BatchGetBuilds":
            answer(200, json.dumps(self.server.builds(json.loads(body))).encode())
        else:
            if call == "FilterLogEvents":
                check_filter(json.loads(body))
            if call == "DeleteStack":
                self.server.empty_repositories(parse_qs(body.decode())["StackName"][0])
            self._forward(body, answer)

    def _of_provisioned(self, call: str, body: bytes) -> Answer | None:
        if (match := _EVENTS.fullmatch(call)) and "Qualifier" not in self.path:
            return 200, json.dumps(self.server.event_settings(match[1])).encode(), {}
        account, unreserved = self.server.client("lambda"), self.server.limits.unreserved
        kept = self.server.provisioned
        return kept.answer(self.command, self.path, call, body, account=account, unreserved=unreserved)

    def _call(self, body: bytes) -> str:
        """The operation's name: as target, as form field, or as method and path."""
        target = self.headers.get("X-Amz-Target")
        if target is not None:
            return str(target).rpartition(".")[2]
        if "x-www-form-urlencoded" in self.headers.get("Content-Type", ""):
            return parse_qs(body.decode())["Action"][0]
        command = "LIST" if self.path.endswith("?List=ALL") else self.command
        return f"{command} {urlsplit(self.path).path}"

    def _forward(self, body: bytes, reply: Callable[..., None]) -> None:
        target = urlsplit(self.server.moto)
        connection = http.client.HTTPConnection(str(target.hostname), target.port)
        headers = {name: value for name, value in self.headers.items() if name.lower() not in _HOP_BY_HOP}
        connection.request(self.command, self.path, body=body, headers=headers)
        answer = connection.getresponse()
        data = answer.read()
        if match := _CONFIGURATION.fullmatch(urlsplit(self.path).path):
            data = self.server.states.shown(match[1], data)
        kept = {name: value for name, value in answer.getheaders() if name.lower() not in _HOP_BY_HOP}
        reply(answer.status, data, kept)
        connection.close()

    def _answer(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"x-amzn-RequestId": str(uuid.uuid4()), **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@contextmanager
def aws_cloud(folder: Path, moto: str | None = None) -> Iterator[AwsCloud]:
    """An account whose images lie below `folder`; on moto's server at `moto`, or one of its own."""
    with nullcontext(moto) if moto else moto_endpoint() as endpoint:
        cloud = AwsCloud(endpoint, folder)
        threading.Thread(target=cloud.serve_forever, args=(0.02,), daemon=True).start()
        try:
            yield cloud
        finally:
            cloud.close()
