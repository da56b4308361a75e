"""What `fompi up` runs on a host. It answers requests, lines of JSON on its standard input, and ends with that input.

Its source is sent over ssh and run by the Python that is there, which may be an old one without fompi. So it imports
the standard library only. It writes no file that is not asked for, and listens only on the address and for the one
connection that are asked for; that connection begins with a token which both ends got over ssh.
"""

import fcntl
import hashlib
import hmac
import json
import os
import platform
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time

SIOCGIFADDR, SIOCGIFNETMASK = 0x8915, 0x891B
ASK_MPI = (
    "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; "
    "print(*MPI.Get_library_version().splitlines()[0].split(',')[0].split())"
)
MPI_SECONDS = 10
DIGEST_NBYTES = 1 << 24
CONNECT_SECONDS = 2
PINGS = 30
FIRST_NBYTES, MOST_NBYTES, GROWTH = 1 << 16, 1 << 30, 4
"""The message that measures grows by GROWTH until it takes a third of its time."""

PIECE = 1 << 18
HEADER = struct.Struct("!cQ")
SEND, RETURN, END = b"s", b"r", b"e"
ACKNOWLEDGEMENT = b"\x06"


# ------------------------------------------------------------------------------------------------------------- facts


def facts(program="", folder="", files=()):
    """Versions, cores, memory, network interfaces, folders, and the digests of `files`, as values of JSON."""
    return {
        "name": socket.gethostname(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "processor": platform.machine(),
        "versions": {name: version_of(name) for name in ("fompi", "numpy", "mpi4py")},
        "mpi": mpi_library(),
        "mpirun": os.access(program, os.X_OK),
        "cores": len(os.sched_getaffinity(0)),
        "memory": memory(),
        "interfaces": interfaces(),
        "ssh": os.environ.get("SSH_CONNECTION", "").split()[::2],  # the addresses of the client and of this host
        "full": [text for text in map(unwritable, ("/dev/shm", tempfile.gettempdir())) if text],
        "folder": os.path.isdir(folder),
        "files": {name: digest(os.path.join(folder, name)) for name in files},
    }


def version_of(package):
    try:
        from importlib import metadata

        return metadata.version(package)
    except Exception:  # not installed, or a Python before 3.8
        return ""


def mpi_library():
    """The first line of the MPI library's version; or "error: ..." if mpi4py cannot load it."""
    command = [sys.executable, "-c", ASK_MPI]
    try:
        done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=MPI_SECONDS)
    except (OSError, subprocess.SubprocessError) as error:
        return f"error: {error}"
    if done.returncode:
        return f"error: {(done.stderr.decode(errors='replace').strip().splitlines() or ['no message'])[-1]}"
    return done.stdout.decode(errors="replace").strip()


def memory():
    """The bytes of memory that are free for programs."""
    try:
        with open("/proc/meminfo") as file:
            words = dict(line.split(":", 1) for line in file)
        return int(words["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError, ValueError):
        return 0


def unwritable(folder, nbytes=1 << 22):
    """Why a file of so many bytes cannot be written there, or ""."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            file.write(bytes(nbytes))
            file.flush()
    except OSError as error:
        return f"{folder}: {error.strerror or error}"
    return ""


def digest(path):
    """Of a program, or of the beginning and the size of data, which may be large."""
    try:
        with open(path, "rb") as file:
            return f"{hashlib.sha256(file.read(DIGEST_NBYTES)).hexdigest()} {os.path.getsize(path)}"
    except OSError:
        return ""


def interfaces(system="/sys/class/net"):
    """Each network interface: its IPv4 address or "", the bits of its network, its speed, and what kind it is."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            address, mask = (_ioctl(asking, name, request) for request in (SIOCGIFADDR, SIOCGIFNETMASK))
            if address.startswith("127."):
                continue
            speed = text_of(os.path.join(system, name, "speed"))
            found.append({
                "name": name,
                "address": address,
                "bits": bin(int.from_bytes(socket.inet_aton(mask or "0.0.0.0"), "big")).count("1"),
                "megabits": int(speed) if speed.isdigit() else 0,
                "is_wireless": os.path.isdir(os.path.join(system, name, "wireless")),
                "is_cable": os.path.exists(os.path.join(system, name, "device")),
                "is_up": text_of(os.path.join(system, name, "carrier")) == "1",
            })  # fmt: skip
    return found


def _ioctl(asking, name, request):
    try:
        record = fcntl.ioctl(asking.fileno(), request, struct.pack("256s", name.encode()[:15]))
    except OSError:  # no address
        return ""
    return socket.inet_ntoa(record[20:24])


def text_of(path):
    """What is in a file of the system, or ""."""
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:  # no such file, or an interface that is down
        return ""


def clock():
    """The seconds of this host's wall clock."""
    return time.time()


def kernels(ranks=1, threads="", size=512):
    """Operations per second of a product, and bytes per second of a copy, of a rank. Zeros without NumPy.

    `ranks` share the host, each with so many `threads` ("": all cores).
    """
    os.environ.update({"OMP_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads} if threads else {})
    cores = len(os.sched_getaffinity(0))
    crowd = max(1.0, ranks * (int(threads) if threads.isdigit() else cores) / cores)
    try:
        import numpy
    except ImportError:
        return [0.0, 0.0]
    a, b, c = (numpy.ones((size, size), numpy.float32) for _ in range(3))
    source, target = numpy.ones(1 << 22, numpy.float64), numpy.empty(1 << 22, numpy.float64)

    def least(call, rounds=5):
        seconds = []
        for _ in range(rounds):
            begun = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - begun)
        return min(seconds)

    work = {
        2.0 * size**3: lambda: numpy.matmul(a, b, out=c),
        2.0 * source.nbytes: lambda: numpy.copyto(target, source),
    }
    return [amount / least(call) / crowd for amount, call in work.items()]


def write(path, text, mode=0o644):
    """Write a file, for this user. The folder must not be another user's, who could put a program there."""
    folder = os.path.dirname(path)
    os.makedirs(folder, 0o700, exist_ok=True)
    if os.lstat(folder).st_uid != os.getuid():
        raise OSError(f"{folder} belongs to another user: set FOMPI_CACHE to a folder of your own")
    with open(path, "w") as file:
        file.write(text)
    os.chmod(path, mode)


# ------------------------------------------------------------------------------------------------- a network, by TCP


def listen(address, token, seconds):
    """Answer one measurement on this address. Returns the port at once."""
    listener = socket.create_server((address, 0), backlog=1)
    listener.settimeout(seconds)
    threading.Thread(target=_answer, args=(listener, token.encode(), seconds), daemon=True).start()
    return listener.getsockname()[1]


def _answer(listener, token, seconds):
    try:
        with listener:
            stream, _ = listener.accept()
        with stream:
            _prepare(stream, seconds)
            if not hmac.compare_digest(bytes(_receive(stream, len(token), True)), token):
                return
            while True:
                what, nbytes = HEADER.unpack(bytes(_receive(stream, HEADER.size, True)))
                if what == END:
                    return
                if what == SEND:
                    _receive(stream, nbytes)
                    stream.sendall(ACKNOWLEDGEMENT)
                else:
                    _send(stream, nbytes)
    except OSError:  # the other end says what happened
        pass


def connect(address, port, source, token, seconds):
    """Measure the way to a host that listens: seconds of an empty message, and bytes per second there and back.

    Without `seconds` no rate is measured.
    """
    try:
        stream = socket.create_connection((address, port), timeout=CONNECT_SECONDS, source_address=(source, 0))
    except ConnectionRefusedError:
        raise OSError("refused") from None
    except TimeoutError:
        raise OSError("dropped") from None
    except OSError as error:
        raise OSError(error.strerror or str(error)) from None
    try:
        with stream:
            _prepare(stream, CONNECT_SECONDS + seconds)
            stream.sendall(token.encode())
            latency = min(_timed(stream, SEND, 0) for _ in range(PINGS)) / 2
            rates = [_rate(stream, way, seconds) if seconds else 0.0 for way in (SEND, RETURN)]
            stream.sendall(HEADER.pack(END, 0))
    except TimeoutError:
        raise OSError("dropped") from None
    return {"latency": latency, "there": rates[0], "back": rates[1]}


def _prepare(stream, seconds):
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    stream.settimeout(seconds)


def _rate(stream, way, seconds):
    nbytes = FIRST_NBYTES
    while True:
        used = _timed(stream, way, nbytes)
        if used > seconds / 3 or nbytes >= MOST_NBYTES:
            return nbytes / used
        nbytes *= max(2, min(GROWTH, int(seconds / max(used, 1e-9) / 1.5)))


def _timed(stream, way, nbytes):
    begun = time.perf_counter()
    stream.sendall(HEADER.pack(way, nbytes))
    if way == SEND:
        _send(stream, nbytes)
        nbytes = len(ACKNOWLEDGEMENT)
    _receive(stream, nbytes)
    return time.perf_counter() - begun


def _send(stream, nbytes):
    piece = memoryview(bytes(PIECE))
    for rest in range(nbytes, 0, -PIECE):
        stream.sendall(piece[:rest])


def _receive(stream, nbytes, keep=False):
    """Receive so many bytes. They are returned if they are to be kept."""
    incoming, done = memoryview(bytearray(nbytes if keep else PIECE)), 0
    while done < nbytes:
        count = stream.recv_into(incoming[done:] if keep else incoming[: nbytes - done])
        if not count:
            raise OSError("closed by the other end: not an agent of this check")
        done += count
    return incoming if keep else b""


# ------------------------------------------------------------------------------------------------------------ requests


REQUESTS = {each.__name__: each for each in (facts, clock, kernels, write, listen, connect)}


def serve(requests, answers):
    """Answer requests, each in a thread of its own, until there are no more."""
    lock = threading.Lock()
    answers.write("\n")  # what the host prints at a login may have no end of a line

    def answer(number, what, arguments):
        try:
            reply = {"number": number, "value": REQUESTS[what](**arguments)}
        except Exception as error:
            reply = {"number": number, "error": str(error) or type(error).__name__}
        with lock:
            answers.write(json.dumps(reply) + "\n")
            answers.flush()

    for line in requests:
        request = json.loads(line)
        threading.Thread(
            target=answer, args=(request["number"], request["what"], request["arguments"]), daemon=True
        ).start()


if __name__ == "__main__":
    serve(sys.stdin, sys.stdout)
    os._exit(0)  # not waiting for a measurement that hangs
