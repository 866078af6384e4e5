"""A server of Google Cloud Storage's JSON API in a thread: objects with generations, conditional writes, and faults.

Of the registry's emulators gcp-storage-emulator (2026.7) ignores ifGenerationMatch and answers without generations, so
that two jobs could claim one directory there, and TensorStore could not read from it.

    with GcsEmulator() as emulator:
      emulator.fault = lambda request, number: 503 if number == 7 else None       # 'lost': done, and not answered
      os.environ.update(emulator.environment)
"""

import base64
from collections.abc import Callable
import datetime
import hashlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
import json
import threading
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import google_crc32c


class GcsEmulator:
  """Holds the objects of every bucket that is named in `buckets`.

  Attributes:
    fault: called with (method and path, number of the request); an HTTP status, or 'lost', or None.
    requests: of all that came, method and path.
  """

  def __init__(self, buckets: tuple[str, ...] = ('bucket',)):
    self.buckets: dict[str, dict[str, tuple[int, bytes, dict[str, Any]]]] = {name: {} for name in buckets}
    self.fault: Callable[[str, int], int | str | None] = lambda request, number: None
    self.requests: list[str] = []
    self.lock = threading.Lock()
    self.uploads: dict[str, tuple[str, str, dict[str, str], bytes]] = {}
    self._server = _Server(('127.0.0.1', 0), type('Handler', (_Handler,), {'emulator': self}))
    self.url = f'http://127.0.0.1:{self._server.server_address[1]}'
    self.environment = environment(self.url)
    self._generation = 1000

  def __enter__(self) -> 'GcsEmulator':
    threading.Thread(target=self._server.serve_forever, kwargs={'poll_interval': 0.05}, daemon=True).start()
    return self

  def __exit__(self, *_: object) -> None:
    self._server.shutdown()
    self._server.server_close()

  def put(self, bucket: str, name: str, data: bytes, query: dict[str, str]) -> tuple[int, Any]:
    with self.lock:
      objects = self.buckets[bucket]
      wanted = query.get('ifGenerationMatch')
      if wanted is not None and int(wanted) != (objects[name][0] if name in objects else 0):
        return 412, {'error': {'code': 412, 'message': 'conditionNotMet'}}
      self._generation += 1
      objects[name] = self._generation, data, about(bucket, name, self._generation, data)
    return 200, objects[name][2]


def environment(url: str) -> dict[str, str]:
  """The variables by which gcsfs and TensorStore find an emulator."""
  return {'STORAGE_EMULATOR_HOST': url, 'TENSORSTORE_GCS_HTTP_URL': url, 'GOOGLE_AUTH_TOKEN_FOR_TESTING': 'emulator'}


def about(bucket: str, name: str, generation: int, data: bytes) -> dict[str, Any]:
  now = datetime.datetime.fromtimestamp(1.7e9 + generation, datetime.UTC).strftime('%Y-%m-%dT%H:%M:%S.%fZ')
  crc = base64.b64encode(google_crc32c.value(data).to_bytes(4, 'big')).decode()
  return {
    'kind': 'storage#object',
    'name': name,
    'bucket': bucket,
    'generation': str(generation),
    'metageneration': '1',
    'size': str(len(data)),
    'timeCreated': now,
    'updated': now,
    'md5Hash': base64.b64encode(hashlib.md5(data).digest()).decode(),
    'crc32c': crc,
    'storageClass': 'STANDARD',
    'etag': str(generation),
  }


class _Server(ThreadingHTTPServer):
  daemon_threads = True
  request_queue_size = 128

  def handle_error(self, *_: object) -> None:
    pass  # a client that does not wait for its answer


class _Handler(BaseHTTPRequestHandler):
  emulator: GcsEmulator
  protocol_version = 'HTTP/1.1'

  def log_message(self, *_: object) -> None:
    pass

  def _handle(self) -> None:
    emulator, url = self.emulator, urlsplit(self.path)
    body = self.rfile.read(int(self.headers.get('Content-Length') or 0))
    request = f'{self.command} {unquote(self.path)}'
    with emulator.lock:
      emulator.requests.append(request)
      number = len(emulator.requests)
    fault = emulator.fault(request, number)
    if isinstance(fault, int):
      return self._answer(fault, {'error': {'code': fault, 'message': 'a fault of the test'}})
    query = {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
    answer = self._do(url.path, query, body)
    if fault == 'lost':
      self.close_connection = True
      return None
    return self._answer(*answer)

  do_GET = do_POST = do_PUT = do_DELETE = _handle  # noqa: N815

  def _answer(self, status: int, content: Any = None, headers: dict[str, str] | None = None) -> None:
    data = content if isinstance(content, bytes) else b'' if content is None else json.dumps(content).encode()
    self.send_response(status)
    for name, value in {'Content-Length': str(len(data)), **(headers or {})}.items():
      self.send_header(name, value)
    self.end_headers()
    self.wfile.write(data)

  def _do(self, path: str, query: dict[str, str], body: bytes) -> tuple[Any, ...]:
    missing = 404, {'error': {'code': 404, 'message': 'The specified bucket does not exist.'}}
    parts = path.removeprefix('/upload').removeprefix('/download').split('/')  # '', storage, v1, b, bucket, o, name
    bucket, rest = unquote(parts[4]), parts[6:]
    if bucket not in self.emulator.buckets:
      return missing
    objects = self.emulator.buckets[bucket]
    if len(parts) == 5:
      return 200, {'kind': 'storage#bucket', 'name': bucket}
    if path.startswith('/upload'):
      return self._upload(bucket, query, body)
    if not rest:
      return 200, _listing(dict(objects), query)
    name = unquote(rest[0])
    if name not in objects:
      return 404, {'error': {'code': 404, 'message': 'No such object'}}
    generation, data, description = objects[name]
    if self.command == 'DELETE':
      with self.emulator.lock:
        objects.pop(name, None)
      return 204, None
    if rest[1:2] == ['rewriteTo']:
      _, made = self.emulator.put(unquote(rest[3]), unquote(rest[5]), data, query)
      return 200, {'done': True, 'resource': made}
    if rest[1:]:
      return 501, None
    if query.get('alt') != 'media':
      return 200, description
    if query.get('ifGenerationNotMatch') == str(generation):
      return 304, None
    if query.get('ifGenerationMatch', str(generation)) != str(generation):
      return 412, None
    headers = {'x-goog-generation': str(generation), 'x-goog-metageneration': '1', 'ETag': str(generation)}
    if span := self.headers.get('Range'):
      first, _, last = span.removeprefix('bytes=').partition('-')
      first, last = int(first), min(int(last or len(data) - 1), len(data) - 1)
      if first >= len(data):
        return 416, None
      headers['Content-Range'] = f'bytes {first}-{last}/{len(data)}'
      return 206, data[first : last + 1], headers
    return 200, data, headers

  def _upload(self, bucket: str, query: dict[str, str], body: bytes) -> tuple[Any, ...]:
    kind, uploads = query.get('uploadType'), self.emulator.uploads
    if 'upload_id' in query:
      own, name, conditions, data = uploads[query['upload_id']]
      span = self.headers.get('Content-Range', 'bytes 0-').removeprefix('bytes ').partition('-')[0]
      data = data[: int(span) if span.isdigit() else len(data)] + body  # the same part may come again
      uploads[query['upload_id']] = own, name, conditions, data
      if self.headers.get('Content-Range', '').endswith('/*'):
        return 308, None, {'Range': f'bytes=0-{len(data) - 1}'}
      return self.emulator.put(own, name, data, conditions)
    if kind == 'media':
      return self.emulator.put(bucket, query['name'], body, query)
    if kind == 'resumable':
      key = str(len(uploads))
      uploads[key] = bucket, query.get('name') or json.loads(body)['name'], query, b''
      return 200, None, {'Location': f'{self.emulator.url}/upload/storage/v1/b/{bucket}/o?upload_id={key}'}
    boundary = self.headers['Content-Type'].partition('boundary=')[2].strip('"\'').encode()
    _, about_it, content, *_ = body.split(b'--' + boundary)
    end = b'\r\n' if about_it.startswith(b'\r\n') else b'\n'
    description, content = (part.partition(end + end)[2] for part in (about_it, content))
    return self.emulator.put(bucket, json.loads(description)['name'], content.removesuffix(end), query)


def _listing(objects: dict[str, tuple[int, bytes, dict[str, Any]]], query: dict[str, str]) -> dict[str, Any]:
  prefix, delimiter = query.get('prefix', ''), query.get('delimiter', '')
  first, end = query.get('startOffset', ''), query.get('endOffset', '')
  items, prefixes = [], []
  for name in sorted(objects):
    if not name.startswith(prefix) or name < first or (end and name >= end):
      continue
    below = name[len(prefix) :].partition(delimiter) if delimiter else (name, '', '')
    if delimiter and below[1]:
      if (directory := f'{prefix}{below[0]}{delimiter}') not in prefixes:
        prefixes.append(directory)
    else:
      items.append(objects[name][2])
  start, count = int(query.get('pageToken') or 0), int(query.get('maxResults') or 1000)
  more = {'nextPageToken': str(start + count)} if start + count < len(items) else {}
  return {'kind': 'storage#objects', 'items': items[start : start + count], 'prefixes': prefixes, **more}
