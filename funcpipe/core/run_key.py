"""The secret of a run, which its client and its functions share and the storage never holds.

All objects of a run are signed with it, so that write access to the storage is not enough to act for the run.
Each object is signed with a key of its own, derived from the secret, the purpose and the object's name (HMAC-SHA256,
RFC 2104, used as in RFC 5869). So what was signed as one object does not pass as another.
"""

import hmac
import secrets
from dataclasses import dataclass, field

from funcpipe.errors import InvalidValue

_BYTES = 32


@dataclass(frozen=True, slots=True)
class RunKey:
    """The secret of one run; `text` is 64 hexadecimal digits, which no representation shows."""

    text: str = field(repr=False)

    def __post_init__(self) -> None:
        try:
            size = len(bytes.fromhex(self.text))
        except ValueError:
            size = 0
        if size != _BYTES or len(self.text) != 2 * _BYTES:
            raise InvalidValue("run key", "…", f"must be {2 * _BYTES} hexadecimal digits")

    @classmethod
    def new(cls) -> "RunKey":
        """Make a random key."""
        return cls(secrets.token_hex(_BYTES))

    @property
    def fingerprint(self) -> str:
        """A public identifier of this key: 16 hexadecimal digits."""
        return self.derive("fingerprint", "")[:8].hex()

    def derive(self, purpose: str, name: str) -> bytes:
        """Return the 32 bytes of the key for `purpose` of the object `name`."""
        return hmac.digest(bytes.fromhex(self.text), f"{purpose}\0{name}".encode(), "sha256")
