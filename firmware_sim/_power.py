"""Power and identity of a chip: which image boots on which silicon, and whether it is still on."""

from __future__ import annotations

import hashlib
import weakref
from pathlib import Path
from typing import ClassVar, NoReturn, Self

from firmware_sim._commands import Gate
from firmware_sim._silicon import Fuses, Silicon, State
from firmware_sim.chip import Chip
from firmware_sim.evidence.digest import Digest
from firmware_sim.evidence.envelope import SigningKey
from firmware_sim.hooks import Hooks
from firmware_sim.identity import Firmware, IdentityError, check_image
from firmware_sim.mailbox import ChipFailure, ErrorCode, MailboxError
from firmware_sim.nvram import Disk, PosixDisk

__all__ = ["PoweredChip"]

_SHA256_OF_ABC = "ba7816bf8f01cfea414140de5dae2223"
_RFC8032_PRIVATE = "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60"
_RFC8032_SIGNATURE = "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e06522490155"


class PoweredChip(Chip):
    """A chip whose silicon one process has powered on, with an image that its maker signed."""

    _hooks_type: ClassVar[type[Hooks]] = Hooks

    def __init_subclass__(cls, *, hooks: type[Hooks] | None = None) -> None:
        """Make a class of chips whose firmware has these hooks; None for those of its base."""
        super().__init_subclass__()
        cls._hooks_type = cls._hooks_type if hooks is None else hooks

    def __init__(self, silicon: Silicon, firmware: Firmware, hooks: Hooks) -> None:
        self._silicon = silicon
        self._hooks = hooks
        self._fuses: Fuses = silicon.fuses
        self._firmware = firmware
        self._gate = Gate(silicon.fuses.secrets.chip_id)
        self._finalizer = weakref.finalize(self, silicon.close)

    @classmethod
    def power_on(cls, folder: Path | str, *, firmware: Firmware | None = None, disk: Disk | None = None) -> Self:
        """Boot the chip in `folder`: self-test, log check, measured boot; `firmware` installs another image first.

        Raises:
            MailboxError: the chip runs already; or the image is not signed by its maker or older than one it has
                booted; or the chip is spent and the image is not the one it last booted.
            NvramError: the folder's content was altered or is missing.
            ChipFailure: the self-test failed or the storage can't be written.
        """
        _self_test()
        silicon = Silicon(Path(folder), disk or PosixDisk())
        try:
            image = silicon.firmware if firmware is None else firmware
            cls._check_signature(silicon, image)
            hooks = cls._hooks_type(silicon)
            if not hooks.allows(image):
                raise MailboxError(
                    ErrorCode.FIRMWARE_ROLLBACK,
                    f"chip {silicon.fuses.secrets.chip_id}: firmware security version {image.security_version} is "
                    f"below {silicon.state.security_floor}, which this chip has already booted",
                )
            chip = cls(silicon, image, hooks)
            chip._start()
            hooks.booted(chip)
        except BaseException:
            silicon.close()
            raise
        return chip

    def _start(self) -> None:
        """Boot, once."""
        raise NotImplementedError

    @property
    def chip_id(self) -> str:
        return self._hooks.identity()

    @property
    def _fused_id(self) -> str:
        return self._fuses.secrets.chip_id

    @property
    def algorithm(self) -> str:
        return self._fuses.algorithm

    @property
    def certificate_digest(self) -> Digest:
        return self._fuses.secrets.certificate_digest

    @property
    def firmware(self) -> Firmware:
        """The image that runs, with its maker's signature."""
        return self._firmware

    def _alias_key(self) -> SigningKey:
        return self._hooks.alias_key(self._firmware)

    @property
    def _changes(self) -> int:
        """The monotonic counter: how often the persistent state has changed."""
        return self._silicon.nvram.sequence

    def _lose_power(self) -> None:
        """End at once, in the middle of a command."""
        self._finalizer()

    def _store(self, state: State) -> None:
        self._require_power()
        self._silicon.store(state)

    def _require_power(self) -> None:
        if not self._finalizer.alive:
            self._refuse(ErrorCode.POWERED_OFF, "chip is powered off")

    def _refuse(self, code: ErrorCode, message: str) -> NoReturn:
        raise MailboxError(code, f"chip {self._fused_id}: {message}")

    @classmethod
    def _check_signature(cls, silicon: Silicon, image: Firmware) -> None:
        try:
            check_image(image, silicon.fuses.secrets)
        except IdentityError as error:
            raise MailboxError(ErrorCode.FIRMWARE_UNSIGNED, str(error)) from None


def _self_test() -> None:
    """Known answers before service: SHA-256 of "abc" (FIPS 180-4 examples) and RFC 8032, 7.1, test 1."""
    key = SigningKey.from_private_bytes(bytes.fromhex(_RFC8032_PRIVATE))
    hash_is_right = hashlib.sha256(b"abc").hexdigest().startswith(_SHA256_OF_ABC)
    if not hash_is_right or not key.sign(b"").hex().startswith(_RFC8032_SIGNATURE):
        raise ChipFailure(ErrorCode.SELF_TEST_FAILED, "self-test failed")
