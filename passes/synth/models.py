"""Well-known models, from their published configurations. Each model adds its kernels to a tape: one forward
pass and its backward.

Decoder              Llama 3, Mistral: grouped queries, RMSNorm, SwiGLU
  with qk_norm       Qwen3: also norms of query and key
  with experts       Mixtral, Qwen3 MoE: router, sort of the tokens by expert, grouped products, combination
ClassicTransformer   GPT-2, ViT: LayerNorm, biases, GELU, one product for query, key and value
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .tape import Param, Tape


@dataclass(frozen=True, slots=True)
class BatchShape:
    """The shape of one micro-batch."""

    batch: int
    sequence: int
    loss_chunks: int

    @property
    def tokens(self) -> int:
        return self.batch * self.sequence


@dataclass(frozen=True, slots=True)
class Decoder:
    """A decoder with RMSNorm and grouped queries, with a SwiGLU MLP or experts."""

    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    ffn: int  # width of the MLP, or of each expert if the model has experts
    tied: bool = False
    qk_norm: bool = False
    experts: int = 0
    experts_per_token: int = 0
    default_sequence: int = 4096
    fixed_sequence: bool = False

    def add_forward_and_loss(self, tape: Tape, shape: BatchShape, layers: int) -> None:
        """Add the kernels of the forward pass and of its loss.

        The loss also adds its own backward kernels.
        """
        param = tape.weights.get_or_add_parameter
        tokens = tape.recorder.add_tensor(f"{tape.prefix}tokens", "input", 8 * shape.tokens)
        table = param("embed_tokens", self.vocabulary * self.hidden)
        x = add_embedding(tape, "embed", tokens, [table], shape.tokens, self.hidden)
        for layer in range(layers):
            name = f"layers.{layer}"
            x = tape.add_layer(name, x, lambda t, i, n=name: self._add_layer(t, i, n, shape))  # type: ignore[misc]
        x = tape.add_norm("norm", x, [param("norm", self.hidden)], shape.tokens)
        head = table if self.tied else param("lm_head", self.vocabulary * self.hidden)
        add_chunked_loss(tape, x, tokens, head, shape, self.vocabulary)

    def _add_layer(self, tape: Tape, x: int, name: str, shape: BatchShape) -> int:
        tokens, hidden, param = shape.tokens, self.hidden, tape.weights.get_or_add_parameter
        width, kv_width = self.heads * self.head_size, self.kv_heads * self.head_size
        h = tape.add_norm(f"{name}.norm1", x, [param(f"{name}.norm1", hidden)], tokens)

        def add_projection(which: str, columns: int, heads: int) -> int:
            weight = param(f"{name}.w{which}", hidden * columns)
            y = tape.add_linear(
                f"{name}.w{which}", h, [weight], tokens * columns, 2 * tokens * hidden * columns
            )
            if which != "v" and self.qk_norm:
                y = tape.add_norm(
                    f"{name}.{which}_norm", y, [param(f"{name}.{which}_norm", self.head_size)], tokens * heads
                )
            if which == "v":
                return y
            return tape.add_elementwise(
                f"{name}.rope_{which}", [y], tape.recorder.bytes_of_tensor(y), saves=False
            )

        qkv = [
            add_projection(which, columns, heads)
            for which, columns, heads in (
                ("q", width, self.heads),
                ("k", kv_width, self.kv_heads),
                ("v", kv_width, self.kv_heads),
            )
        ]
        flop = 4 * shape.batch * shape.sequence**2 * width // 2  # causal attention uses half of the square
        out_bytes = tokens * width * tape.element_bytes
        o = tape.add_attention(f"{name}.attention", qkv, out_bytes, tokens * self.heads, flop)
        weight = param(f"{name}.wo", width * hidden)
        o = tape.add_linear(f"{name}.wo", o, [weight], tokens * hidden, 2 * tokens * width * hidden)
        r = tape.add_residual(f"{name}.add1", x, o)
        h = tape.add_norm(f"{name}.norm2", r, [param(f"{name}.norm2", hidden)], tokens)
        y = self._add_experts(tape, h, name, tokens) if self.experts else self._add_mlp(tape, h, name, tokens)
        return tape.add_residual(f"{name}.add2", r, y)

    def _add_mlp(self, tape: Tape, h: int, name: str, tokens: int) -> int:
        size, flop = self.hidden * self.ffn, 2 * tokens * self.hidden * self.ffn
        gate, up = (
            tape.add_linear(
                f"{name}.{w}",
                h,
                [tape.weights.get_or_add_parameter(f"{name}.{w}", size)],
                tokens * self.ffn,
                flop,
            )
            for w in ("gate", "up")
        )
        s = tape.add_elementwise(f"{name}.swiglu", [gate, up], tape.recorder.bytes_of_tensor(gate))
        down = tape.weights.get_or_add_parameter(f"{name}.down", size)
        return tape.add_linear(f"{name}.down", s, [down], tokens * self.hidden, flop)

    def _add_experts(self, tape: Tape, h: int, name: str, tokens: int) -> int:
        """Add a layer of experts. One tensor holds the stacked weights of all experts.

        The profile assumes that every expert gets the same number of tokens. Every micro-batch therefore
        reads the weights of every expert.
        """
        rows, hidden, ffn, param = (
            tokens * self.experts_per_token,
            self.hidden,
            self.ffn,
            tape.weights.get_or_add_parameter,
        )
        router = param(f"{name}.router", hidden * self.experts)
        logits = tape.add_linear(
            f"{name}.router", h, [router], tokens * self.experts, 2 * tokens * hidden * self.experts
        )
        routes = tape.add_elementwise(f"{name}.top_k", [logits], 12 * rows)  # an fp32 weight, an int64 index
        sorted_ = tape.add_elementwise(f"{name}.dispatch", [h, routes], rows * hidden * tape.element_bytes)
        gate_up = param(f"{name}.experts.gate_up", self.experts * hidden * 2 * ffn)
        both = tape.add_linear(
            f"{name}.experts.gate_up", sorted_, [gate_up], rows * 2 * ffn, 4 * rows * hidden * ffn
        )
        s = tape.add_elementwise(f"{name}.experts.swiglu", [both], rows * ffn * tape.element_bytes)
        down = param(f"{name}.experts.down", self.experts * ffn * hidden)
        y = tape.add_linear(f"{name}.experts.down", s, [down], rows * hidden, 2 * rows * ffn * hidden)
        return tape.add_elementwise(f"{name}.combine", [y, routes], tokens * hidden * tape.element_bytes)


@dataclass(frozen=True, slots=True)
class ClassicTransformer:
    """A transformer with LayerNorm and biases.

    If `patch` is 0, the model is a language model with tied embeddings. Any other `patch` makes it a model of
    images, which are cut into squares of `patch` x `patch` pixels.
    """

    hidden: int
    layers: int
    heads: int
    default_sequence: int
    vocabulary: int = 0
    patch: int = 0
    classes: int = 0

    @property
    def fixed_sequence(self) -> bool:
        return bool(self.patch)

    def add_forward_and_loss(self, tape: Tape, shape: BatchShape, layers: int) -> None:
        """Add the kernels of the forward pass and of its loss.

        The loss also adds its own backward kernels.
        """
        param, hidden = tape.weights.get_or_add_parameter, self.hidden
        positions = param("position", self.default_sequence * hidden)
        if self.patch:
            x = self._add_patch_embedding(tape, shape, positions)
        else:
            tokens = tape.recorder.add_tensor(f"{tape.prefix}tokens", "input", 8 * shape.tokens)
            table = param("token", self.vocabulary * hidden)
            x = add_embedding(tape, "embed", tokens, [table, positions], shape.tokens, hidden)
        for layer in range(layers):
            name = f"layers.{layer}"
            x = tape.add_layer(name, x, lambda t, i, n=name: self._add_layer(t, i, n, shape))  # type: ignore[misc]
        x = tape.add_norm("norm", x, _add_weight_and_bias(tape, "norm", hidden, hidden), shape.tokens)
        if not self.patch:
            add_chunked_loss(tape, x, tokens, table, shape, self.vocabulary)
            return
        labels = tape.recorder.add_tensor(f"{tape.prefix}labels", "input", 8 * shape.batch)
        first = tape.add_elementwise(
            "class_token", [x], shape.batch * hidden * tape.element_bytes, saves=False
        )
        params = _add_weight_and_bias(tape, "head", hidden * self.classes, self.classes)
        flop = 2 * shape.batch * hidden * self.classes
        logits = tape.add_linear("head", first, params, shape.batch * self.classes, flop)
        tape.recorder.add_kernel("cross_entropy", [logits, labels], [logits])
        tape.add_gradient_part(logits, logits)  # the gradient of the logits overwrites the logits

    def _add_patch_embedding(self, tape: Tape, shape: BatchShape, positions: Param) -> int:
        """Add the patch embedding, then the class token and the positions.

        The stride of the patch embedding's convolution equals its size. The convolution is therefore one
        matrix product.
        """
        side, squares = self.patch, self.default_sequence - 1
        pixels, count = 3 * side * side, shape.batch * squares
        image = tape.recorder.add_tensor(f"{tape.prefix}images", "input", count * pixels * tape.element_bytes)
        tape.leaves.add(image)
        params = _add_weight_and_bias(tape, "patch", pixels * self.hidden, self.hidden)
        x = tape.add_linear("patch", image, params, count * self.hidden, 2 * count * pixels * self.hidden)
        token = tape.weights.get_or_add_parameter("class_token", self.hidden)
        y = tape.add_activation("embed.out", shape.tokens * self.hidden * tape.element_bytes)
        tape.recorder.add_kernel("embed", [x, token.weight, positions.weight], [y])

        def add_backward() -> None:
            dy = tape.sum_gradient_parts(y, "embed")
            dx = tape.add_activation("embed.dx", tape.recorder.bytes_of_tensor(x))
            read, written = tape.weights.gradients_read_and_written([token, positions])
            tape.recorder.add_kernel("embed.backward", [dy, *read], [dx, *written])
            tape.add_gradient_part(x, dx)

        tape.entries.append(add_backward)
        return y

    def _add_layer(self, tape: Tape, x: int, name: str, shape: BatchShape) -> int:
        tokens, hidden, square = shape.tokens, self.hidden, self.hidden * self.hidden
        per_square = 2 * tokens * square

        def add_linear(which: str, h: int, columns: int, rows: int) -> int:
            full = f"{name}.{which}"
            params = _add_weight_and_bias(tape, full, columns * rows * square, columns * hidden)
            return tape.add_linear(full, h, params, tokens * columns * hidden, columns * rows * per_square)

        h = tape.add_norm(
            f"{name}.norm1", x, _add_weight_and_bias(tape, f"{name}.norm1", hidden, hidden), tokens
        )
        qkv = add_linear("qkv", h, 3, 1)
        flop = 4 * shape.batch * shape.sequence**2 * hidden // (1 if self.patch else 2)
        out_bytes = tokens * hidden * tape.element_bytes
        o = tape.add_attention(f"{name}.attention", [qkv], out_bytes, tokens * self.heads, flop)
        r = tape.add_residual(f"{name}.add1", x, add_linear("projection", o, 1, 1))
        h = tape.add_norm(
            f"{name}.norm2", r, _add_weight_and_bias(tape, f"{name}.norm2", hidden, hidden), tokens
        )
        up = add_linear("up", h, 4, 1)
        s = tape.add_elementwise(f"{name}.gelu", [up], tape.recorder.bytes_of_tensor(up))
        return tape.add_residual(f"{name}.add2", r, add_linear("down", s, 1, 4))


def _add_weight_and_bias(tape: Tape, name: str, elements: int, bias: int) -> list[Param]:
    return [
        tape.weights.get_or_add_parameter(f"{name}.weight", elements),
        tape.weights.get_or_add_parameter(f"{name}.bias", bias),
    ]


def add_embedding(tape: Tape, name: str, tokens: int, tables: Sequence[Param], rows: int, hidden: int) -> int:
    """Add a kernel that looks up rows in tables.

    Its backward kernel adds rows to the gradient of each table. A gradient is as large as its table.
    """
    y = tape.add_activation(f"{name}.out", rows * hidden * tape.element_bytes)
    moved = 2 * len(tables) * tape.recorder.bytes_of_tensor(y)
    tape.recorder.add_kernel(name, [tokens, *(t.weight for t in tables)], [y], moved_bytes=moved)

    def add_backward() -> None:
        parts = tape.pending.pop(y)
        fresh = sum(tape.weights.precision.grad_bytes * t.elements for t in tables if t.grad is None)
        read, written = tape.weights.gradients_read_and_written(tables)
        if written:
            tape.recorder.add_kernel(
                f"{name}.backward", [*parts, tokens, *read], written, moved_bytes=fresh + 2 * moved
            )

    tape.entries.append(add_backward)
    return y


def add_chunked_loss(
    tape: Tape, x: int, tokens: int, head: Param, shape: BatchShape, vocabulary: int
) -> None:
    """Add the head, the cross entropy and their backward kernels.

    The kernels run for one slice of the tokens after another, so only one slice of the logits exists at a
    time. The gradient of the logits overwrites the logits.
    """
    recorder, chunks = tape.recorder, shape.loss_chunks
    dx = tape.add_activation("head.dx", recorder.bytes_of_tensor(x))
    flop = (
        2
        * shape.tokens
        * recorder.bytes_of_tensor(x)
        // (tape.element_bytes * shape.tokens)
        * vocabulary
        // chunks
    )
    slice_bytes, head_bytes = recorder.bytes_of_tensor(x) // chunks, recorder.bytes_of_tensor(head.weight)
    for chunk in range(chunks):
        logits = tape.add_activation(
            f"logits.{chunk}", shape.tokens * vocabulary * tape.element_bytes // chunks
        )
        moved = slice_bytes + head_bytes + recorder.bytes_of_tensor(logits)
        recorder.add_kernel(f"head.{chunk}", [x, head.weight], [logits], flop=flop, moved_bytes=moved)
        recorder.add_kernel(f"cross_entropy.{chunk}", [logits, tokens], [logits])
        recorder.add_kernel(f"head.{chunk}.dgrad", [logits, head.weight], [dx], flop=flop, moved_bytes=moved)
        read, written = tape.weights.gradients_read_and_written([head])
        if written:
            recorder.add_kernel(f"head.{chunk}.wgrad", [logits, x, *read], written, flop=flop)
    tape.add_gradient_part(x, dx)


Model = Decoder | ClassicTransformer

# Each model with its published number of parameters. Tests count the elements of the model's weights, and
# compare the count with the published number.
MODELS: dict[str, tuple[Model, int]] = {
    "llama-3.2-1b": (Decoder(128256, 2048, 16, 32, 8, 64, 8192, tied=True), 1_235_814_400),
    "llama-3.2-3b": (Decoder(128256, 3072, 28, 24, 8, 128, 8192, tied=True), 3_212_749_824),
    "llama-3.1-8b": (Decoder(128256, 4096, 32, 32, 8, 128, 14336), 8_030_261_248),
    "llama-3.1-70b": (Decoder(128256, 8192, 80, 64, 8, 128, 28672), 70_553_706_496),
    "llama-3.1-405b": (Decoder(128256, 16384, 126, 128, 8, 128, 53248), 405_853_388_800),
    "mistral-7b": (Decoder(32000, 4096, 32, 32, 8, 128, 14336), 7_241_732_096),
    "mixtral-8x7b": (
        Decoder(32000, 4096, 32, 32, 8, 128, 14336, experts=8, experts_per_token=2),
        46_702_792_704,
    ),
    "qwen3-8b": (Decoder(151936, 4096, 36, 32, 8, 128, 12288, qk_norm=True), 8_190_735_360),
    "qwen3-32b": (Decoder(151936, 5120, 64, 64, 8, 128, 25600, qk_norm=True), 32_762_123_264),
    "qwen3-30b-a3b": (
        Decoder(151936, 2048, 48, 32, 4, 128, 768, qk_norm=True, experts=128, experts_per_token=8),
        30_532_122_624,
    ),
    "gpt2": (ClassicTransformer(768, 12, 12, 1024, vocabulary=50257), 124_439_808),
    "gpt2-xl": (ClassicTransformer(1600, 48, 25, 1024, vocabulary=50257), 1_557_611_200),
    "vit-b-16": (ClassicTransformer(768, 12, 12, 197, patch=16, classes=1000), 86_567_656),
    "vit-l-16": (ClassicTransformer(1024, 24, 16, 197, patch=16, classes=1000), 304_326_632),
}
