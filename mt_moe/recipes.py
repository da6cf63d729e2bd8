"""FP8 recipes as data: what is scaled how, which of the six products uses FP8, and what travels in FP8.

The experts' forward and backward are six products, three a linear layer:

    fc1   h  = x @ W1.T          dx = dh @ W1          dW1 = dh.T @ x
    fc2   y  = a @ W2.T          da = dy @ W2          dW2 = dy.T @ a

An FP8 product needs both operands scaled along its reduction dimension, and Hopper's matrix unit reads FP8 with that
dimension contiguous. The two products of a row (forward, input gradient) reduce over columns, the weight gradient over
tokens: its operands are quantised a second time, along tokens, and written transposed.

    "block"  one scale per 1 x 128 elements of a row (along tokens: 128 x 1) and per 128 x 128 of a weight, as
             DeepSeek-V3 (arXiv 2412.19437, section 3.3). An outlier costs its neighbours in 128 elements, not a row.
    "row"    one scale per row and per output row of a weight: coarser, and one factor for each side of the product.

Scales of powers of two move only exponents. Values that are quantised twice (rows arrive in FP8 and are quantised again
along tokens) then lose no bit of their fraction by the division, so blocks are so scaled by default.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Final

from comm_core.runtime.errors import UsageError

SCALINGS: Final = ("block", "row")
DTYPES: Final = ("fp8", "bf16")
PRODUCTS: Final = ("auto", "torch", "transformer_engine", "emulated")
BLOCK: Final = 128
# Grouped FP8 products read rows in pieces of 16 bytes; blocks along tokens must not hold two experts.
ROW_ALIGNMENT: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How the experts compute in FP8 (E4M3 everywhere, sums in fp32).

    Args:
        name: how it is called.
        scaling: "block" or "row", of activations, gradients and weights; along tokens "row" means one scale per column
            and expert.
        power_of_two: scales are rounded up to powers of two.
        fc1_forward: dtype of h = x @ W1.T, "fp8" or "bf16" (the dtype of the rows); likewise the next five.
        fc1_input_grad: of dx = dh @ W1.
        fc1_weight_grad: of dW1 = dh.T @ x.
        fc2_forward: of y = a @ W2.T.
        fc2_input_grad: of da = dy @ W2.
        fc2_weight_grad: of dW2 = dy.T @ a.
        keep: what backward keeps of rows that came unquantised: "fp8" (half the memory, quantised twice) or "bf16".
        dispatch: dtype in which tokens travel to their experts, "fp8" or "bf16". Combine is never FP8.
        dispatch_grad: dtype in which gradients of the experts' outputs travel to them.
        products: "auto" takes the first library whose products hold in a probe; or "torch", "transformer_engine", or
            "emulated": dequantised operands in an ordinary product, for numerics without FP8 hardware, at no gain of
            speed. "auto" never emulates.

    Raises:
        UsageError: a value that can not work.
    """

    name: str
    scaling: str
    power_of_two: bool = True
    fc1_forward: str = "fp8"
    fc1_input_grad: str = "fp8"
    fc1_weight_grad: str = "fp8"
    fc2_forward: str = "fp8"
    fc2_input_grad: str = "fp8"
    fc2_weight_grad: str = "fp8"
    keep: str = "fp8"
    dispatch: str = "fp8"
    dispatch_grad: str = "bf16"
    products: str = "auto"

    def __post_init__(self) -> None:
        choices: dict[str, tuple[str, ...]] = {
            field.name: DTYPES for field in fields(self) if field.name.startswith(("fc1", "fc2", "dispatch"))
        }
        choices |= {"keep": DTYPES, "scaling": SCALINGS, "products": PRODUCTS}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise UsageError(
                    f"{name} = {getattr(self, name)!r} in recipe {self.name!r}",
                    allowed=" or ".join(allowed),
                    fix=f"change {name} in Recipe",
                )

    @property
    def alignment(self) -> int:
        """What `expert_alignment` must be a multiple of."""
        along_tokens = "fp8" in (self.fc1_weight_grad, self.fc2_weight_grad)
        return BLOCK if self.scaling == "block" or along_tokens else ROW_ALIGNMENT


RECIPES: Final[dict[str, Recipe]] = {
    recipe.name: recipe
    for recipe in (
        Recipe(name="blockwise", scaling="block"),
        Recipe(
            name="rowwise",
            scaling="row",
            power_of_two=False,
            fc1_weight_grad="bf16",
            fc2_weight_grad="bf16",
            keep="bf16",
            dispatch="bf16",
        ),
    )
}
BF16: Final = "bf16"


def recipe_names() -> tuple[str, ...]:
    """The names that `MoEConfig.recipe` takes."""
    return (BF16, *RECIPES)


def recipe_of(name: str | Recipe) -> Recipe | None:
    """The recipe of a name, or itself; None for "bf16".

    Raises:
        UsageError: no recipe has this name.
    """
    if isinstance(name, Recipe):
        return name
    if name == BF16:
        return None
    if name not in RECIPES:
        raise UsageError(
            f"recipe {name!r}", allowed=", ".join(recipe_names()), fix="choose one of them, or pass a Recipe"
        )
    return RECIPES[name]


def emulated(name: str) -> Recipe:
    """A named recipe whose products are emulated, to see its numerics where no FP8 product exists."""
    recipe = recipe_of(name)
    if recipe is None:
        raise UsageError(f"emulated({name!r})", allowed=", ".join(RECIPES), fix="choose an FP8 recipe")
    return replace(recipe, products="emulated")
