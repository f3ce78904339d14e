"""An environment for the `environment_factory` of TRL's trainers."""


class Shop:
    def __init__(self, price: int = 3) -> None:
        self._price = price

    def reset(self, seed=0, **row) -> str:
        self._sold, self._wanted = 0, seed % 3 + 1
        return f"Buy {self._wanted} cups of tea."

    def buy(self, count: int) -> str:
        """
        Buy tea.

        Args:
            count: Number of cups.
        """
        if count > 9:
            raise ValueError("there are nine cups")
        self._sold += count
        return f"{count * self._price} crowns"

    async def look(self) -> str:
        """Look at the shop."""
        return "open"

    def get_reward(self) -> float:
        return float(self._sold == self._wanted)


class Unpaid:
    """Has neither a reward nor a prompt of its own."""

    def reset(self, **row) -> None: ...

    def look(self) -> str:
        """Look at the shop."""
        return "open"
