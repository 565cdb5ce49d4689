"""Alibaba Cloud for tests: the API of Function Compute 3.0, and instances that really run the container's entry.

After the documentation of the API (CreateFunction, InvokeFunction, GetAsyncTask, …); instances are those of
`container`. A cloud is one region; several may share one `Ram`. Every request must be signed with ACS3-HMAC-SHA256,
which is checked in full. Requests are recorded, and may be made to fail.
"""

import json
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from tests.cloud_emulation.acs3 import is_signed
from tests.cloud_emulation.container import Instance
from tests.cloud_emulation.log_service import LogProjects, call_of
from tests.cloud_emulation.processes import Start, in_clean_folder
from tests.cloud_emulation.ram import ACCOUNT, Ram
from tests.contract.oss_server import REGION

_FUNCTION = re.compile(r"/2023-03-30/functions/(?P<name>[\w-]+)(?P<rest>/.*)?")


GPU_INSTANCES: dict[tuple[str, int], tuple[list[float], range | list[int]]] = {
    ("fc.gpu.tesla.1", 16384): ([n / 20 for n in range(1, 161)], range(128, 32769)),
    ("fc.gpu.ampere.1", 24576): ([n / 20 for n in range(1, 161)], range(128, 32769)),
    ("fc.gpu.ada.1", 49152): ([4, 8, 16], [32768, 65536, 98304]),
    ("fc.gpu.hopper.1", 98304): ([16], [98304]),
}
"""The processors and the memory in MB that go with a whole card and its memory: the vendor's FAQ about billing, 2026;
of ampere.1 an assumption, from older pages.
"""

_STATUSES = {"ResourceExhausted": 429, "ResourceThrottled": 503, "InternalServerError": 500}
"""The statuses of errors other than refusals (alibabacloud.com/help/en/functioncompute/error-codes, 2026-09)."""


class AliyunCloud(ThreadingHTTPServer):
    """The account in a region: `images` have folder and command, requests tell what is in `preparing`, one by one."""

    daemon_threads = True
    request_queue_size = 128  # or connections that come at once are reset while this machine is busy

    def __init__(self, region: str, ram: Ram) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.region, self.ram = region, ram
        self.functions: dict[str, dict[str, Any]] = {}
        self.configs: dict[str, dict[str, Any]] = {}
        self.quotas: dict[str, int] = {}
        self.preparing: dict[str, list[dict[str, str]]] = {}
        self.triggers: dict[tuple[str, str], dict[str, Any]] = {}
        self.tasks: dict[tuple[str, str], dict[str, Any]] = {}
        self.images: dict[str, tuple[Path, list[str]]] = {}
        self.calls: list[str] = []
        self.refuse: Callable[[str], str | None] = lambda call: None
        self.lose_answer: Callable[[str], bool] = lambda call: False
        self.environment: dict[str, str] = {}
        self.lines: list[str] = []
        self.logs = LogProjects()
        self.instances: dict[tuple[str, str], Instance] = {}
        self.idle: list[Instance] = []
        self.start: Start = in_clean_folder
        self.lock = threading.Lock()
        self.pool = ThreadPoolExecutor(32)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def run(self, name: str, task: str, payload: bytes) -> None:
        """One event: an instance, its initialisation, the invocation; no retries unless they are configured."""
        record, function = self.tasks[name, task], self.functions[name]
        with self.lock:
            if record["status"] == "Stopping":
                record["status"] = "Stopped"
                return
            if refused := self.refused_image(function):
                record.update(status="Failed", taskErrorMessage=refused)
                return
            record |= {"status": "Running", "startedTime": int(time.time() * 1000)}
            instance = self.instances[name, task] = self._idle_or_new(function)
        status, message = instance.invoke(payload)
        self.logs.keep(function, instance.id, instance.take_events())
        with self.lock:
            if instance.alive:
                self.idle.append(instance)
            record.update(status="Stopped" if record["status"] == "Stopping" else status, taskErrorMessage=message)
            record["durationMs"] = int(time.time() * 1000) - record["startedTime"]

    def _idle_or_new(self, function: dict[str, Any]) -> Instance:
        """An instance of the function as it is now that serves no event, or one that begins."""
        for instance in self.idle:
            if instance.function is function and instance.alive:
                self.idle.remove(instance)
                return instance
        image, command = self.images[function["customContainerConfig"]["image"]]
        return Instance(function, image, command, environment=self.environment, lines=self.lines, start=self.start)

    def stop(self, name: str, task: str) -> None:
        """End a task, whether it has begun or not; one that has ended stays as it is."""
        record = self.tasks[name, task]
        with self.lock:
            begun = record["status"] == "Running"
            if begun or record["status"] == "Enqueued":
                record["status"] = "Stopping"
        if begun:
            self.instances[name, task].kill()

    def pass_a_minute(self) -> list[tuple[str, str]]:
        """Every timer invokes its function with the event of a timer; the names of the functions and events."""
        started = []
        for (name, timer), trigger in self.triggers.items():
            config, event = json.loads(trigger["triggerConfig"]), str(uuid.uuid4())
            if config["enable"]:
                body = {"triggerTime": "2026-11-22T10:00:00Z", "triggerName": timer, "payload": config["payload"]}
                self.tasks[name, event] = {"taskId": event, "status": "Enqueued"}
                self.pool.submit(self.run, name, event, json.dumps(body).encode())
                started.append((name, event))
        return started

    def refused_image(self, function: Mapping[str, Any]) -> str | None:
        """Why the function's role cannot get its image, which happens before an instance is initialised.

        One of the Enterprise Edition is asked of the instance that is named beside it, and of none otherwise.
        """
        config = function["customContainerConfig"]
        if re.match(r"[^/.]+\.[^/.]+\.cr\.aliyuncs\.com/", config["image"]) and not config.get("acrInstanceId"):
            return "an image of the Enterprise Edition needs acrInstanceId"
        return self.ram.missing_to_pull(function["role"], config["image"], self.region)

    def task_page(self, name: str, query: Mapping[str, str]) -> dict[str, Any]:
        """The tasks of a function that began at a time or later, not more than 100, behind the one that a token names.

        One that waits for an instance has not begun.
        """
        limit, since_ms = int(query.get("limit", 20)), int(query["startedTimeBegin"])
        assert 1 <= limit <= 100
        with self.lock:
            own = [dict(self.tasks[key]) for key in sorted(self.tasks) if key[0] == name]
        begun = [task for task in own if task.get("startedTime", -1) >= since_ms]
        left = [task for task in begun if task["taskId"] > query.get("nextToken", "")]
        page = left[:limit]
        return {"tasks": page} | ({"nextToken": page[-1]["taskId"]} if page != left else {})

    def quota_page(self, limit: int, after: str) -> dict[str, Any]:
        """The functions' own quotas, not more than ten at once, behind the function that the token names."""
        names = [name for name in sorted(self.quotas) if name > after]
        shown = names[: min(limit, 10)]
        arn = f"acs:fc:{self.region}:{ACCOUNT}:functions"
        configs = [{"functionArn": f"{arn}/{name}", "reservedConcurrency": self.quotas[name]} for name in shown]
        return {"configs": configs} | ({"nextToken": shown[-1]} if shown != names else {})

    def keep_image(self, image: str, folder: Path) -> None:
        begin = (folder / "Dockerfile").read_text().splitlines()[-1]
        self.images[image] = folder, json.loads(begin.removeprefix("ENTRYPOINT "))

    def close(self) -> None:
        self.shutdown()
        for instance in set(self.instances.values()):
            instance.close()
        self.pool.shutdown(cancel_futures=True)
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: AliyunCloud
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.call = call = self.headers["x-acs-action"] or call_of(self.command, self.path)
        self.server.calls.append(call)
        refused = self.server.refuse(call)
        if "x-acs-action" not in self.headers:
            answer = self.server.logs.answer(self.command, self.path, dict(self.headers), body, refused=refused)
            self._answer(answer.status, answer.value, answer.headers)
        elif not is_signed(self.command, self.path, self.headers, body):
            self._fail(403, "SignatureDoesNotMatch", "the signature does not match")
        elif refused is not None:
            self._fail(_STATUSES.get(refused, 403), refused, "refused by the test")
        elif match := _FUNCTION.fullmatch(urlsplit(self.path).path):
            self._of_function(match["name"], match["rest"] or "", body)
        else:
            self._other(call, body)

    do_POST = do_PUT = do_DELETE = do_GET

    def _other(self, call: str, body: bytes) -> None:
        query = self._query() | dict(parse_qsl(body.decode(errors="replace")))
        cloud = self.server
        match call:
            case "CreateFunction":
                value = json.loads(body)
                if value["functionName"] in cloud.functions:
                    self._fail(409, "FunctionAlreadyExists", "it exists")
                elif value["customContainerConfig"]["image"] not in cloud.images:
                    self._fail(400, "InvalidArgument", "there is no such image")
                else:
                    self._keep(value)
            case "ListFunctions":
                names = sorted(name for name in cloud.functions if name.startswith(query.get("prefix", "")))
                self._answer(200, {"functions": [cloud.functions[name] for name in names]})
            case "ListConcurrencyConfigs":
                self._answer(200, cloud.quota_page(int(query["limit"]), query.get("nextToken", "")))
            case "GetCallerIdentity":
                self._answer(200, {"AccountId": ACCOUNT})
            case _:
                answer = cloud.ram.answer(call, query)
                self._answer(answer.status, answer.value)

    def _query(self) -> dict[str, str]:
        return dict(parse_qsl(urlsplit(self.path).query))

    def _keep(self, value: dict[str, Any]) -> None:
        assert value["runtime"] == "custom-container"
        assert value["memorySize"] % 64 == 0
        if "gpuConfig" in value:
            gpu = value["gpuConfig"]
            assert (gpu["gpuType"], gpu["gpuMemorySize"]) in GPU_INSTANCES
            vcpu, memory_mb = GPU_INSTANCES[gpu["gpuType"], gpu["gpuMemorySize"]]
            assert value["cpu"] in vcpu
            assert value["memorySize"] in memory_mb
        else:
            assert value["memorySize"] <= 32768
            assert 1 <= value["memorySize"] / 1024 / value["cpu"] <= 4
        assert value["role"], "without which functions cannot write logs"
        if hook := value.get("instanceLifecycleConfig", {}).get("initializer"):
            assert len(hook.keys() & {"handler", "command"}) == 1
            assert 1 <= hook["timeout"] <= 300
        assert self.server.logs.has(value["logConfig"]["project"], value["logConfig"]["logstore"])
        refused = self.server.refused_image(value)
        state = {"state": "Failed", "stateReason": refused} if refused else {"state": "Active"}
        kept = {key: kept for key, kept in value.items() if key not in ("state", "stateReason")}
        self.server.functions[value["functionName"]] = {**kept, **state}
        self._answer(200, self.server.functions[value["functionName"]])

    def _of_function(self, name: str, rest: str, body: bytes) -> None:
        cloud = self.server
        if name not in cloud.functions:
            self._fail(404, "FunctionNotFound", f"there is no {name}")
        elif not rest and self.command == "DELETE":
            self._delete(name)
        elif not rest and self.command == "PUT":
            self._keep({**cloud.functions[name], **json.loads(body)})
        elif not rest:
            shown = cloud.preparing.get(name)
            self._answer(200, cloud.functions[name] | (shown.pop(0) if shown else {}))
        elif rest.startswith("/triggers"):
            self._of_trigger(name, rest.removeprefix("/triggers").strip("/"), body)
        elif rest == "/invocations":
            self._invoke(name, body)
        elif rest == "/async-invoke-config" and self.command == "PUT":
            cloud.configs[name] = json.loads(body)
            self._answer(200, cloud.configs[name])
        elif rest == "/async-invoke-config" and self.command == "GET" and name in cloud.configs:
            self._answer(200, cloud.configs[name])
        elif rest.startswith("/async-tasks"):
            self._of_task(name, *rest.split("/")[2:])
        else:
            self._fail(404, "AsyncConfigNotExists", rest)

    def _delete(self, name: str) -> None:
        if any(function == name for function, _ in self.server.triggers):
            self._fail(409, "FunctionNotEmpty", f"{name} has triggers")
            return
        del self.server.functions[name]
        self.server.configs.pop(name, None)
        self._answer(204, None)

    def _invoke(self, name: str, body: bytes) -> None:
        cloud, task = self.server, self.headers["x-fc-async-task-id"]
        assert self.headers["x-fc-invocation-type"] == "Async"
        assert cloud.configs[name]["asyncTask"] is True
        assert cloud.configs[name]["maxAsyncRetryAttempts"] == 0
        if len(body) > 128 * 1024:
            self._fail(413, "PayloadTooLarge", "128 KB")
        elif (name, task) in cloud.tasks:
            self._fail(409, "AsyncTaskAlreadyExists", task)
        else:
            cloud.tasks[name, task] = {"taskId": task, "status": "Enqueued"}
            cloud.pool.submit(cloud.run, name, task, body)
            self._answer(202, None, {"x-fc-async-task-id": task, "x-fc-request-id": task})

    def _of_trigger(self, name: str, trigger: str, body: bytes) -> None:
        triggers, value = self.server.triggers, json.loads(body) if body else {}
        trigger = trigger or value["triggerName"]
        exists = (name, trigger) in triggers
        if exists == (self.command == "POST"):
            self._fail(409 if exists else 404, "TriggerAlreadyExists" if exists else "TriggerNotFound", trigger)
        elif self.command == "DELETE":
            del triggers[name, trigger]
            self._answer(204, None)
        else:
            kept = {**triggers.get((name, trigger), {}), **value}
            config = json.loads(kept["triggerConfig"])
            assert (kept["triggerType"], kept["qualifier"]) == ("timer", "LATEST")
            assert re.fullmatch(r"[A-Za-z_][\w-]{0,127}", kept["triggerName"])
            assert config.keys() == {"cronExpression", "enable", "payload"}
            assert config["cronExpression"] == "@every 1m"
            assert isinstance(config["enable"], bool)
            assert isinstance(config["payload"], str)
            triggers[name, trigger] = kept
            self._answer(200, kept)

    def _of_task(self, name: str, task: str | None = None, verb: str | None = None) -> None:
        tasks = self.server.tasks
        if task is None:
            self._answer(200, self.server.task_page(name, self._query()))
        elif (name, task) not in tasks:
            self._fail(404, "AsyncTaskNotFound", task)
        else:
            if verb == "stop":
                self.server.stop(name, task)
            self._answer(200, None if verb else tasks[name, task])

    def _fail(self, status: int, code: str, message: str) -> None:
        self._answer(status, {"Code": code, "Message": message, "RequestId": str(uuid.uuid4())})

    def _answer(self, status: int, value: object, headers: Mapping[str, str] | None = None) -> None:
        if self.server.lose_answer(self.call):
            self.close_connection = True
            return
        body = b"" if value is None else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        for name, text in (headers or {}).items():
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@contextmanager
def aliyun_cloud(region: str = REGION, ram: Ram | None = None) -> Iterator[AliyunCloud]:
    """An empty region, of an account of its own or of the one that `ram` belongs to."""
    cloud = AliyunCloud(region, ram or Ram())
    thread = threading.Thread(target=cloud.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield cloud
    finally:
        cloud.close()
        thread.join()
