"""A small server for Alibaba's OSS protocol: put, get with ranges, copy, delete and list, every signature checked.

After the documentation of PutObject, GetObject, CopyObject, UploadPartCopy and what belongs to it, HeadObject,
DeleteMultipleObjects, ListObjectsV2 and of signature version 4 of OSS; written apart from the SDK that talks to it.
Buckets are in the path. Objects may be put into any bucket; those of `buckets` were made, and have a lifecycle, as the
documentation of PutBucket, PutBucketLifecycle, GetBucketInfo and DeleteBucket has it. One copy takes at most
`one_copy_bytes`; buckets of `versioned` heed no header against overwriting. By a domain of `domains` a bucket is
reached without its name in the path. To a `new_account`
objects are open by such domains only, as in mainland China to accounts since 2025-03-20
(alibabacloud.com/help/en/object-storage-service/latest/map-custom-domain-names-1, 2025-12).
"""

import base64
import hashlib
import hmac
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, quote, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

REGION, ACCESS_KEY, SECRET_KEY = "cn-test", "oss-test", "oss-secret"
BUCKET_INFO = (
    "<BucketInfo><Bucket><Name>{name}</Name><Location>oss-cn-test</Location><CreationDate>2026-01-01T00:00:00.000Z"
    "</CreationDate><ExtranetEndpoint>e</ExtranetEndpoint><IntranetEndpoint>i</IntranetEndpoint><StorageClass>Standard"
    "</StorageClass><Owner><ID>1</ID><DisplayName>1</DisplayName></Owner><AccessControlList><Grant>private</Grant>"
    "</AccessControlList></Bucket></BucketInfo>"
)


class OssServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # or connections that come at once are reset while this machine is busy

    def __init__(self, region: str = REGION) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.region = region
        self.new_account = False
        self.domains: dict[str, str] = {}
        self.objects: dict[str, bytes] = {}
        self.written: dict[str, int] = {}
        self.one_copy_bytes = 2**30
        self.versioned: set[str] = set()
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.buckets: dict[str, bytes] = {}
        self.lock = threading.Lock()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: OssServer
    disable_nagle_algorithm = True

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if not self._is_admitted():
            return
        if self._bucket is not None:
            self._put_bucket(body)
            return
        if "x-oss-copy-source" in self.headers:
            self._copy()
            return
        with self.server.lock:
            forbids = self.headers.get("x-oss-forbid-overwrite") == "true" and not self._is_versioned
            if forbids and self._key in self.server.objects:
                self._fail(409, "FileAlreadyExists", "The object you specified already exists.")
                return
            self._write(body)
        self._answer(200, b"", ETag='"0"')

    def _write(self, body: bytes) -> None:
        """Make the object be `body`, written later than all others; the lock is held."""
        self.server.objects[self._key] = body
        self.server.written[self._key] = 1 + max(self.server.written.values(), default=0)

    def _copy(self) -> None:
        """CopyObject, or UploadPartCopy with a number of a part."""
        source, part = unquote(self.headers["x-oss-copy-source"]).removeprefix("/"), self._query.get("partNumber")
        with self.server.lock:
            body, upload = self.server.objects.get(source), self.server.uploads.get(self._query.get("uploadId", ""))
            if body is None:
                self._fail(404, "NoSuchKey", "The specified key does not exist.")
                return
            first, _, last = (
                self.headers.get("x-oss-copy-source-range", "bytes=0-").removeprefix("bytes=").partition("-")
            )
            copied = body[int(first) : int(last) + 1 if last else None]
            if len(copied) > self.server.one_copy_bytes:
                self._fail(400, "InvalidArgument", "The size of the copy source is too large; use upload part copy.")
                return
            if part is None:
                self._write(copied)
            elif upload is None:
                self._fail(404, "NoSuchUpload", "The specified multipart upload does not exist.")
                return
            else:
                upload[int(part)] = copied
        kind = "CopyObjectResult" if part is None else "CopyPartResult"
        text = f'<{kind}><LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>"0"</ETag></{kind}>'
        self._answer(200, text.encode(), ETag='"0"')

    def do_HEAD(self) -> None:
        if not self._is_admitted():
            return
        body = self.server.objects.get(self._key)
        self.send_response(404 if body is None else 200)
        self.send_header("Content-Length", str(len(body or b"")))
        self.end_headers()

    def do_GET(self) -> None:
        if not self._is_admitted():
            return
        if self._bucket is not None:
            self._get_bucket()
            return
        body = self.server.objects.get(self._key)
        if body is None:
            self._fail(404, "NoSuchKey", "The specified key does not exist.")
            return
        wanted = self.headers.get("Range")
        if wanted is None:
            self._answer(200, body)
            return
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        start, stop = int(first or 0), min(int(last) + 1 if last else len(body), len(body))
        if not first:
            start, stop = max(len(body) - int(last), 0), len(body)
        if start >= len(body):
            strict = self.headers.get("x-oss-range-behavior") == "standard"
            if strict:
                self._fail(416, "InvalidRange", "The requested range cannot be satisfied.")
            else:
                self._answer(200, body)
            return
        self._answer(206, body[start:stop], **{"Content-Range": f"bytes {start}-{stop - 1}/{len(body)}"})

    def do_DELETE(self) -> None:
        if not self._is_admitted():
            return
        if self._bucket is not None:
            self._delete_bucket()
            return
        with self.server.lock:
            if "uploadId" in self._query:
                self.server.uploads.pop(self._query["uploadId"], None)
            else:
                self.server.objects.pop(self._key, None)
        self._answer(204, b"")

    def do_POST(self) -> None:
        """Posts for uploads in parts, and DeleteMultipleObjects; an object called "undeletable" is not deleted."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if not self._is_admitted():
            return
        if self._bucket is None:
            self._post_upload(body)
            return
        if "delete" not in self._query or base64.b64encode(hashlib.md5(body).digest()) != self._md5:
            self._fail(400, "InvalidDigest", "The Content-MD5 you specified is not valid.")
            return
        keys = [str(key.text) for key in ElementTree.fromstring(body).iter("Key")]
        deleted = [key for key in keys if not key.endswith("/undeletable")]
        with self.server.lock:
            for key in deleted:
                self.server.objects.pop(f"{self._bucket}/{key}", None)
        items = "".join(f"<Deleted><Key>{escape(quote(key))}</Key></Deleted>" for key in deleted)
        text = f"<DeleteResult><EncodingType>url</EncodingType>{items}</DeleteResult>"
        self._answer(200, text.encode())

    def _post_upload(self, body: bytes) -> None:
        """InitiateMultipartUpload, or CompleteMultipartUpload: all parts but the last have more than 100 KB."""
        bucket, _, key = self._key.partition("/")
        with self.server.lock:
            if "uploads" in self._query:
                upload = f"upload-{len(self.server.uploads)}"
                self.server.uploads[upload] = {}
                names = f"<Bucket>{bucket}</Bucket><Key>{escape(key)}</Key><UploadId>{upload}</UploadId>"
                text = f"<InitiateMultipartUploadResult>{names}</InitiateMultipartUploadResult>"
                self._answer(200, text.encode())
                return
            parts = self.server.uploads.get(self._query["uploadId"], {})
            named = [int(str(number.text)) for number in ElementTree.fromstring(body).iter("PartNumber")]
            if not named or named != sorted(named) or not parts.keys() >= set(named):
                self._fail(400, "InvalidPart", "One or more of the specified parts could not be found.")
            elif any(len(parts[number]) <= 100 * 1024 for number in named[:-1]):
                self._fail(400, "EntityTooSmall", "Your proposed upload smaller than the minimum allowed size.")
            else:
                self._write(b"".join(parts[number] for number in named))
                del self.server.uploads[self._query["uploadId"]]
                self._answer(200, b"", ETag='"0"')

    def _put_bucket(self, body: bytes) -> None:
        if "lifecycle" in self._query:
            self.server.buckets[str(self._bucket)] = body
        else:
            self.server.buckets.setdefault(str(self._bucket), b"")
        self._answer(200, b"")

    def _get_bucket(self) -> None:
        lifecycle = self.server.buckets.get(str(self._bucket))
        if not self._query.keys() & {"bucketInfo", "lifecycle"}:
            self._list()
        elif lifecycle is None:
            self._fail(404, "NoSuchBucket", "The specified bucket does not exist.")
        elif "lifecycle" in self._query and not lifecycle:
            self._fail(404, "NoSuchLifecycle", "No Row found in Lifecycle Table.")
        elif "lifecycle" in self._query:
            self._answer(200, lifecycle)
        else:
            self._answer(200, BUCKET_INFO.format(name=self._bucket).encode())

    def _delete_bucket(self) -> None:
        if any(key.startswith(f"{self._bucket}/") for key in self.server.objects):
            self._fail(409, "BucketNotEmpty", "The bucket you tried to delete is not empty.")
        else:
            del self.server.buckets[str(self._bucket)]
            self._answer(204, b"")

    @property
    def _bucket(self) -> str | None:
        """The bucket, where the request is about a bucket itself."""
        bucket, _, key = self._key.partition("/")
        return None if key else bucket

    @property
    def _md5(self) -> bytes:
        return str(self.headers.get("Content-MD5")).encode()

    @property
    def _query(self) -> dict[str, str]:
        return dict(parse_qsl(urlsplit(self.path).query, keep_blank_values=True))

    def _list(self) -> None:
        """Pages of at most three keys, so that clients have to ask for the next."""
        query = dict(parse_qsl(urlsplit(self.path).query))
        bucket = self._key.strip("/")
        after = query.get("continuation-token", "")
        with self.server.lock:
            found = {key: body for key, body in self.server.objects.items() if key.startswith(f"{bucket}/")}
        keys = sorted(key.partition("/")[2] for key in found)
        left = [key for key in keys if key.startswith(query.get("prefix", "")) and key > after]
        page, more = left[:3], len(left) > 3
        items = "".join(
            f"<Contents><Key>{escape(quote(key))}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
            f'<ETag>"{hashlib.md5(found[f"{bucket}/{key}"]).hexdigest().upper()}"</ETag>'
            "<Type>Normal</Type><Size>0</Size><StorageClass>Standard</StorageClass></Contents>"
            for key in page
        )
        token = f"<NextContinuationToken>{escape(quote(page[-1]))}</NextContinuationToken>" if more else ""
        text = (
            f"<ListBucketResult><Name>{bucket}</Name><MaxKeys>3</MaxKeys><EncodingType>url</EncodingType>"
            f"<KeyCount>{len(page)}</KeyCount><IsTruncated>{str(more).lower()}</IsTruncated>{token}{items}"
            "</ListBucketResult>"
        )
        self._answer(200, text.encode())

    @property
    def _is_versioned(self) -> bool:
        """Whether its bucket has versioning on, or suspended: the header against overwriting has no effect there.

        alibabacloud.com/help/en/oss/developer-reference/putobject, 2025-12.
        """
        return self._key.partition("/")[0] in self.server.versioned

    @property
    def _domain_s_bucket(self) -> str | None:
        return self.server.domains.get(self.headers["Host"])

    @property
    def _key(self) -> str:
        path = unquote(urlsplit(self.path).path).lstrip("/")
        return path if self._domain_s_bucket is None else f"{self._domain_s_bucket}/{path}"

    def _is_admitted(self) -> bool:
        """Whether the request is signed, and may be made from outside; if not, it is answered."""
        if not self._is_signed():
            return False
        of_objects = self._bucket is None or bool(self._query.keys() & {"delete", "list-type"})
        if self.server.new_account and of_objects and self._domain_s_bucket is None:
            text = "Not allowed using the OSS public endpoint, please use CNAME instead."
            self._fail(400, "PublicEndpointForbidden", text)
            return False
        return True

    def _is_signed(self) -> bool:
        fields = dict(
            part.split("=", 1) for part in self.headers.get("Authorization", "").partition(" ")[2].split(", ") if part
        )
        date = self.headers.get("x-oss-date", "")
        scope = f"{date[:8]}/{self.server.region}/oss/aliyun_v4_request"
        if fields.get("Credential") != f"{ACCESS_KEY}/{scope}" or fields.get("Signature") != self._signature(
            date, scope
        ):
            self._fail(403, "SignatureDoesNotMatch", "The request signature we calculated does not match.")
            return False
        return True

    def _signature(self, date: str, scope: str) -> str:
        signed = sorted(
            (name.lower(), value)
            for name, value in self.headers.items()
            if name.lower().startswith("x-oss-") or name.lower() in ("content-type", "content-md5")
        )
        query = sorted(
            (quote(name, safe=""), quote(value, safe=""))
            for name, value in parse_qsl(urlsplit(self.path).query, keep_blank_values=True)
        )
        canonical = "\n".join(
            (
                self.command,
                quote(f"/{self._key}", safe="/"),
                "&".join(f"{name}={value}" if value else name for name, value in query),
                "".join(f"{name}:{value}\n" for name, value in signed),
                "",
                self.headers.get("x-oss-content-sha256", ""),
            )
        )
        text = "\n".join(("OSS4-HMAC-SHA256", date, scope, hashlib.sha256(canonical.encode()).hexdigest()))
        key = f"aliyun_v4{SECRET_KEY}".encode()
        for part in (date[:8], self.server.region, "oss", "aliyun_v4_request"):
            key = hmac.digest(key, part.encode(), "sha256")
        return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()

    def _fail(self, status: int, code: str, message: str) -> None:
        self._answer(status, f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode())

    def _answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""
