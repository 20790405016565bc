"""What papers, codes and articles say differently about a scheme, and what this library does about it.

Pages of schemes and `docs/where_the_literature_disagrees.md` are made from this list.
"""

from __future__ import annotations

from dataclasses import dataclass

PAPERS = "Papers, and texts about them"
CODES = "Papers, and the code of their authors"
NAMES = "One name, several things"
FRAMES = "Frameworks"


@dataclass(frozen=True)
class Dispute:
    """One disagreement."""

    title: str
    text: str
    """What is said, what holds, what is done here."""
    schemes: tuple[str, ...] = ()
    """The schemes that it is about."""
    topic: str = PAPERS


DEEPNORM = (
    "deepnorm", "deepnorm_encdec_decoder", "deepnorm_encdec_encoder", "deepnorm_per_stack",
    "deepnorm_encdec_encoder_torchscale", "deepnorm_glm130b",
)  # fmt: skip
POST = ("post_ln", "ds_init", "ds_init_code", "admin", *DEEPNORM)
SCALED = ("gpt2", "nanogpt", "megatron", "opt", "small_init_scaled", "modern", "modern_small")

DISPUTES = (
    Dispute(
        "DeepNorm in an encoder-decoder",
        "Texts often give each stack the single-stack constants, (2N)^(1/4) and (8N)^(-1/4). The paper's decoder has "
        "three sublayers a layer, hence (3M)^(1/4) and (12M)^(-1/4), and its encoder depends on both depths: 0.81 "
        "(N^4 M)^(1/16) and 0.87 (N^4 M)^(-1/16). `deepnorm` follows the paper; `deepnorm_per_stack` is the other.",
        ("deepnorm", "deepnorm_per_stack", "deepnorm_encdec_decoder", "deepnorm_encdec_encoder"),
    ),
    Dispute(
        "What beta is",
        "beta is a gain on Xavier's std, for v, the attention output and the MLP; q and k keep gain 1, which do not "
        "enter the update bound. Read as a std (N(0, beta^2)) the output matrix of a 768-wide, 12-layer model would "
        "be 28 times too large. A gate matrix is outside the paper: it keeps gain 1 unless `scale_gate`. GLM-130B "
        "scales its whole MLP, the gate too.",
        ("deepnorm", "deepnorm_glm130b"),
    ),
    Dispute(
        "Where alpha stands",
        "On the skip: x <- LN(alpha x + F(x)). A widely read tutorial multiplies the branch by it, another copy gives "
        "both sides of an encoder-decoder (2N)^(1/4), and a third turns the sign of beta's exponent round. None of "
        "these bounds the update.",
        DEEPNORM,
    ),
    Dispute(
        "What DeepNorm bounds",
        "The expected first update of the function under SGD, at width 1 and for small weights, not the growth of "
        "activations inside the norm: a post-norm stream is bounded by its norms anyway. Runs of the authors' library "
        "use warm-up. Under Adam the update still grows with depth: `updates: depth` takes the layers' rates down, "
        "and at 96 layers trained 0.12 to 0.14 nats lower in a small test (width 32, 240 steps, two seeds); the best "
        "rate still moved, by a factor of about 2.3 upwards over 16 times the depth: this is no transfer of the rate.",
        ("deepnorm",),
    ),
    Dispute(
        "A divisor in the init does not hold the rate",
        "1/sqrt(2L) is often read as making depth safe. It bounds the first values; Adam's steps do not know it. In a "
        "small test (width 32, 240 steps) the best rate fell by a factor of 2.3 from 6 to 96 layers and the best loss "
        "rose from 2.44 to 2.55. With `updates: depth`, the layers' rates at L0/L, the best rate stayed (a factor of "
        "1.1) and 96 layers trained 0.05 to 0.07 nats lower, at 2.48 still above 6 layers.",
        ("megatron",),
    ),
    Dispute(
        "The encoder's 0.87 and 1.15",
        "The authors' code divides by (N^4 M)^(1/16)/1.15, so its beta is 1.15 (N^4 M)^(-1/16) where the paper has "
        "0.87, which is about 1/1.15: the constant looks inverted. The update bound is then 1.77 instead of 1.01. Two "
        "other code bases have 0.87. In that code the base is torch's default law of a Linear, since its own reset is "
        "never called, and the name match divides biases as well. The exact constants are 27^(-1/16) = 0.8138 and "
        "27^(1/16)/sqrt(2) = 0.8689 (`exact`).",
        ("deepnorm_encdec_encoder", "deepnorm_encdec_encoder_torchscale"),
        CODES,
    ),
    Dispute(
        "Why post-norm is hard to train",
        "A common account has the variance before the norm grow with depth, so that norms divide early gradients "
        "away. Each sublayer reads a normed input, so that variance is the same at every depth. The theorem of "
        "arXiv:2002.04745 is about the other end: gradients near the output are large whatever the depth, which is "
        "why warm-up is needed. The same paper argues in passing that gradients also shrink towards the input; others "
        "report that for decoders only (arXiv:2004.08249), or find it in a product of residual addition and norm "
        "(D19-1083); and a post-norm stack of MLPs alone keeps 0.87 of its gradient over 48 sublayers. Nothing here "
        "asserts vanishing.",
        POST,
    ),
    Dispute(
        "The gradient of a pre-norm stack",
        "Often written as a sum of the output's gradient and of Jacobians. It is a product: dL/dx_0 = dL/dx_R times "
        "all (I + J_l). The identity in it is carried without loss, the whole is not: without a divisor it grows "
        "towards the input (3.9 times over 48 sublayers in one measurement), with 1/sqrt(2L) it is level (1.14).",
        SCALED,
    ),
    Dispute(
        "Var(x) = 1 + s^2",
        "The derivation of 1/sqrt(2L) starts from a stream of unit variance. With tables of std 0.02 it starts at "
        "0.0004, and the branches outweigh the embedding from the first layer on. What holds is Var(x_R) <= Var(x_0) "
        "+ s^2. `spike_no_more` and `megatron` with `embed_std: 1` make the stream start where the derivation does.",
        (*SCALED, "spike_no_more"),
    ),
    Dispute(
        "Layers, sublayers, additions",
        "Formulas count L layers, 2L sublayers, or the matrices that write into the stream, with one letter. Here N "
        "is the number of residual additions: 2L in a sequential block, L in a parallel one, 3L with cross-attention. "
        "Megatron's hybrid models divide by sqrt(L), having one addition a layer; its config says which.",
        SCALED,
    ),
    Dispute(
        "Who scales the outputs of GPT-2",
        "The paper divides residual weights by sqrt(N), N residual layers; the released code does not show it, and "
        "has 0.02 for all matrices, 0.02 for tokens and 0.01 for positions. 2L is how Megatron writes it. Ports that "
        "match the output matrices by name have been seen to scale none.",
        ("gpt2", "nanogpt", "megatron"),
        CODES,
    ),
    Dispute(
        "Does 1/sqrt(2L) make deeper layers count less",
        "No: with a common divisor every layer adds the same to a stream of size 1, and the relative change is nearly "
        "flat (0.079 to 0.075 over 48 sublayers). It falls as 1/sqrt(l) where nothing is divided (0.55 to 0.15).",
        ("megatron", "gpt2", "deepseek", "torchtitan_qwen3"),
    ),
    Dispute(
        "sqrt(2/d), sqrt(2/(5d)), 0.02",
        "One article has the first two and the third for the same matrices, in text, table and code. sqrt(2/d) is "
        "He's rule for ReLU with d_model for the fan, sqrt(5) times the other; sqrt(2/(5d)) is Xavier of a (d, 4d) "
        "matrix, given to all; 0.02 knows no width. No frontier model is known to use sqrt(2/d) for q, k and v. Hence "
        "three schemes: `small_init_scaled`, which is recommended, `modern` and `modern_small`.",
        ("small_init", "small_init_scaled", "modern", "modern_small"),
        NAMES,
    ),
    Dispute(
        "The fan of the down-projection",
        "Schemes by fan give it 1/sqrt(d_ff), half of 1/sqrt(d_model) at d_ff = 4 d; tables that write 1/sqrt(d) for "
        "every matrix give it twice as much. Here a fan belongs to a role, and the formula says which is meant.",
        ("modern", "lecun_normal", "olmo_mitchell", "lingua_disabled"),
        NAMES,
    ),
    Dispute(
        "Truncation",
        "A normal cut at 3 sigma has 0.986578 of its std, at 2 sigma 0.879626. OLMo, lingua and torchtitan's head "
        "state the std before the cut; jax's variance_scaling corrects for it and jax's truncated_normal does not; "
        "axlearn's function of that name does. torch cuts at absolute bounds, +-2 by default, which is 100 sigma at "
        "0.02: torchtitan's and DeiT's truncated normals are plain normals. Here a std is that of the values drawn, "
        "and `corrected: false` gives the others' numbers.",
        ("glorot_normal", "lecun_normal", "olmo2", "olmo_mitchell", "torchtitan_llama3", "layerscale", "modern"),
        FRAMES,
    ),
    Dispute(
        "What the well-known models do",
        "Llama 3, Mistral, Gemma and DeepSeek are often said to share one recipe. DeepSeek states 0.006 for all "
        "parameters and no factor for depth (the 0.02 of its released files is a default for loading); Gemma draws by "
        "fan, has tables of 1/sqrt(d) multiplied by sqrt(d), and norms of 1 + w with w = 0; OLMo 2 has 0.02 with no "
        "factor for depth. The initialization of Llama 3 and Mistral is unpublished. Megatron, GPT-NeoX and nanoGPT "
        "draw plain normals.",
        ("deepseek", "gemma", "olmo2", "megatron", "modern"),
    ),
    Dispute(
        "Xavier keeps the variance",
        "Only where fan-in and fan-out are equal. In general Var(y) = 2 fan_in/(fan_in + fan_out) Var(x): 0.4 from d "
        "to 4d and 1.6 back. It is a compromise between the two directions.",
        ("glorot_normal", "glorot_uniform"),
    ),
    Dispute(
        "Xavier of an embedding",
        "By the formula a table's fans are vocabulary and width, which makes it far too small: a look-up sums one "
        "term. The alias `xavier` draws tables at 1/sqrt(d).",
        ("glorot_normal", "glorot_uniform", "he_normal", "lecun_normal"),
        NAMES,
    ),
    Dispute(
        "Xavier of a fused matrix",
        "Stacked as one (d, 3d) matrix, q, k and v have a larger fan-out, and Xavier is 1/sqrt(2) of that of three "
        "(d, d) matrices. fairseq writes that factor out, and Fixup's and T-Fixup's codes inherit it; T-Fixup then "
        "multiplies v by sqrt(2) only to undo it. Here matrices are never fused for a law; the factor is in `post_ln` "
        "and `fixup`, whose sources have it, and not in `tfixup`, whose paper does not.",
        ("post_ln", "fixup", "tfixup_decoder", "tfixup_encoder"),
        CODES,
    ),
    Dispute(
        "One gate a layer, or one a branch",
        "ReZero's Transformer shares one scalar between attention and MLP of a layer; most descriptions have one for "
        "each. `share` chooses, the authors' way by default. It has no norm at all: after a zero branch a post-norm "
        "stream would not be the identity.",
        ("rezero",),
        CODES,
    ),
    Dispute(
        "Fixup in one line",
        "Summaries give L^(-1/2) and leave out what makes it work: the last matrix of a branch and the classifier are "
        "zero, each branch has a scalar multiplier and scalar biases, L counts residual branches, and the exponent is "
        "-1/(2m-2) for m matrices in a branch. In the authors' Transformer that is -1/6 for q, k, v and -1/2 for the "
        "MLP. The aim is a function update of order lr for each SGD step. The scalars learn at a tenth of the rate in "
        "the image code and at the full rate in the translation code (`scalar_lr`).",
        ("fixup",),
    ),
    Dispute(
        "T-Fixup's constants",
        "Notes on the web contradict the code and each other; the code and one transcription of the paper agree on "
        "0.67 N^(-1/4) for an encoder. The decoder's (9M)^(-1/4) and the tables' factor have the code alone. A model "
        "that is a decoder only has no formula of its own: it takes the decoder's.",
        ("tfixup_decoder", "tfixup_encoder"),
        CODES,
    ),
    Dispute(
        "SkipInit's base law",
        "The paper-style base is He's normal; the reference code draws by Haiku's cut fan-in law and sets the "
        "classifier to zero (`zero_head`).",
        ("skipinit",),
        CODES,
    ),
    Dispute(
        "DS-Init's exponent",
        "The paper divides layer l by sqrt(l). Its code passes l^(-1/2) to a function that takes a scale of the "
        "variance, so the std falls as l^(-1/4). Both are here.",
        ("ds_init", "ds_init_code"),
        CODES,
    ),
    Dispute(
        "Admin: measured or in closed form",
        "The paper measures its factors on data, for the very stack that is trained; its authors' later package has a "
        "closed form by the growth that one allows. `growth: measured` runs the pass, keeps the numbers with the run "
        "and refuses them for another depth or width: copied to another stack they have been seen to diverge.",
        ("admin",),
        CODES,
    ),
    Dispute(
        "LayerScale's depths",
        "The paper's rule is 0.1 up to 18 layers, 1e-5 up to 24, 1e-6 beyond; released models of 36 layers have 1e-5 "
        "or 1e-6, and the class's default is 1e-4.",
        ("layerscale",),
        CODES,
    ),
    Dispute(
        "LayerNorm scaling with a divisor",
        "The authors advise against 1/sqrt(2L) on top of it; mixing the two is refused. In one snapshot of their code "
        "the branch is never reached, as a name is compared in capitals after it was lower-cased: their numbers are "
        "reproduced by OLMo-core.",
        ("layernorm_scaling",),
        CODES,
    ),
    Dispute(
        "Keel's alpha",
        "Three implementations agree on the number of sublayers, 2L; an older revision of one document has its "
        "inverse root, and a newsletter mixes alpha and 1 - alpha. The first layer is plain pre-norm.",
        ("keel",),
        CODES,
    ),
    Dispute(
        "Sub-LN beyond an encoder-decoder",
        "The constants for one stack, sqrt(ln 2L), have the authors' code alone, whose decoder leaves cross-attention "
        "out of the scaling.",
        ("subln", "subln_encdec_decoder", "subln_encdec_encoder"),
        CODES,
    ),
    Dispute(
        "Output scaling by L, 2L, L + 1, l",
        "wang_init has 2/(L sqrt(d)): 1/L where others have 1/sqrt(2L). lingua's documentation says L, its code has L "
        "+ 1, and the bounds of its attention output are those of the undivided std. OLMo's Mitchell init and "
        "torchtitan divide by the index of the layer: their last layer is the common rule and their first sqrt(L) "
        "times that. OLMo-core and torchtitan divide the up matrix as well, OLMo-core also router and all of an "
        "expert.",
        (
            "wang_init", "lingua_global_depth", "lingua_current_depth", "olmo_mitchell", "torchtitan_llama3",
            "olmo_core_llama", "olmo_core_llama_depth",
        ),
        CODES,
    ),
    Dispute(
        "Dense and sparse models of one family",
        "torchtitan's dense Qwen 3 divides no output, its mixture of experts divides attention and expert outputs by "
        "sqrt(2L).",
        ("torchtitan_qwen3", "torchtitan_qwen3_moe"),
        CODES,
    ),
    Dispute(
        "A table of unit std as a head",
        "T5, PaLM and others draw embeddings at std 1. Tied to the head they need logits over sqrt(d), else the first "
        "loss is about d/2 and not ln V. Tables of 1/sqrt(d) need sqrt(d) on the way in instead. One table has one "
        "std: the scheme says where its factor stands.",
        ("palm", "t5x", "gemma", "torch_linear_default", "olmo_core_llama", "torchtitan_llama3", "post_ln"),
        NAMES,
    ),
    Dispute(
        "1/sqrt(h) folded into the queries",
        "T5 draws queries with 1/sqrt(h) in their std and has no factor at run time. That is the same function at "
        "step 0, and under Adafactor, whose steps are relative to a matrix's size; under Adam the queries learn "
        "sqrt(h) times faster.",
        ("t5x",),
        FRAMES,
    ),
    Dispute(
        "muP's tables",
        "The paper has three equivalent tables; rows of two do not go together. This is table 8, the form of the "
        "authors' package: hidden std over sqrt(m) at rate 1/m, readout as it is with its logits over m. The package "
        "multiplies decay by m unless it is told that decay is decoupled, and scales no eps; the muP column of "
        "arXiv:2505.01618 scales eps by 1/m (`scale_eps`).",
        ("mup", "mup_nanogpt", "megatron_mup"),
    ),
    Dispute(
        "The scale of the scores under muP",
        "1/h where heads grow wider, as definition 4.1 has it; the package's example multiplies that by a constant. "
        "Where heads keep their width 1/sqrt(h) is right at every size: say so with `base_head_dim`.",
        ("mup", "mup_nanogpt", "megatron_mup", "depth_mup", "completep"),
    ),
    Dispute(
        "Depth-muP beyond one-layer branches",
        "arXiv:2310.02244 proves its rule for branches of one matrix and reports its limits for deeper ones. Rows for "
        "norms, biases, decay and eps at alpha = 1/2 come from arXiv:2505.01618, which finds alpha = 1 to transfer.",
        ("depth_mup", "completep"),
    ),
    Dispute(
        "Which eps CompleteP scales",
        "Its table has the blocks' alone; its code, whose AdamW takes one eps, scales all of them. The table is "
        "followed. The outputs have no 1/sqrt(2L) on top of the branch's factor.",
        ("completep", "completed_p"),
        CODES,
    ),
    Dispute(
        "u-muP and its library",
        "The library scales values and gradients apart, and activations and attention by modules of their own. Here "
        "are its weights, residual constants and rates; for Adam a gradient's scale is one factor for all.",
        ("umup",),
        CODES,
    ),
    Dispute(
        "Decay: times lr or not",
        "AdamW multiplies decay by the rate, so a rate of 1/m needs a decay of m to decay alike. Independent decay "
        "(arXiv:2309.14322, u-muP) is not multiplied by the peak rate; an L2 loss goes through Adam's moments and is "
        "no decay at all. `optimizer.decay` chooses, and factors by role are stated for the first.",
        ("mup", "completep", "umup"),
        FRAMES,
    ),
    Dispute(
        "nanochat's docstring",
        "It says that the table has std 1 and leaves out the 0.4 of the MLP; the code has 0.8 and 0.4. Its sister "
        "modded-nanogpt has stopped zeroing the attention output in its shorter track.",
        ("nanochat", "modded_nanogpt_medium"),
        CODES,
    ),
    Dispute(
        "Mimetic initialization",
        "Z has std 1/sqrt(d) in the authors' code; a survey has 1/sqrt(h) for queries and keys, other copies 1/d. The "
        "minus of values and outputs was found on images; for language a plus has been reported. Rotary positions and "
        "norms on queries and keys undo what it sets up.",
        ("mimetic",),
    ),
    Dispute(
        "Base weights that nobody states",
        "NormFormer, Peri-LN, Keel and depth-scaled sandwich norms say nothing, or too little, about the weights "
        "under them. The ones here are a choice, and are said to be one. Pangu's TinyInit is not known well enough to "
        "be given.",
        ("normformer", "peri_ln", "keel", "depth_scaled_sandwich"),
    ),
    Dispute(
        "Draws in low precision",
        "A normal drawn in bfloat16 has 128 distinct values, at most 2.9 sigma, and a mean of -0.011 sigma, which "
        "along the all-ones direction of a wide matrix is as large as the random part. Every draw here is float32, "
        "cast last.",
        topic=FRAMES,
    ),
    Dispute(
        "Fans of kernels with more than two axes",
        "A fan taken from an array's shape is wrong for (d, H, h) kernels (jax's default reads 9216 for 768), for (E, "
        "d, f) experts (MaxText's are sqrt(E f / d) too small) and for stacked layers. Here it follows from the role.",
        topic=FRAMES,
    ),
)  # fmt: skip


def about(scheme: str) -> tuple[Dispute, ...]:
    """The disagreements that concern a scheme."""
    return tuple(d for d in DISPUTES if scheme in d.schemes)
