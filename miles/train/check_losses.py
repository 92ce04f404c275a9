"""Settings in, problems of the loss out: which of its parts fit together, found before anything starts and without torch."""

from __future__ import annotations

from miles.config import Problems, Settings, flags
from miles.config.flags import place
from miles.config.owners import TrainSettings
from miles.errors import HookError
from miles.hooks import load_function
from miles.train.advantages import BASELINED, PENALISED, SCALED, are_read

POLICY_ONLY = (
    "advantage_estimator", "eps_clip", "eps_clip_high", "eps_clip_c", "entropy_coef", "use_tis", "use_rollout_logprobs",
    "use_opsm", "use_kl_loss", "custom_tis_function_path", "custom_pg_loss_reducer_function_path", "get_mismatch_metrics",
)  # fmt: skip
"""Settings that only the policy loss reads."""


def check_losses(settings: Settings, problems: Problems) -> None:
    """Loss, advantages, KL terms and off-policy correction."""
    _check_loss(settings.train, problems)
    _check_type(settings, problems)
    _check_advantages(settings, problems)
    _check_kl(settings, problems)
    _check_hooks(settings.train, problems)
    _check_correction(settings, problems)


def _check_type(settings: Settings, problems: Problems) -> None:
    train = settings.train
    custom = train.loss_type == "custom_loss"
    if custom and train.custom_loss_function_path is None:
        problems.add(
            "--custom-loss-function-path", None, "--loss-type custom_loss needs one", "module.name of a function works"
        )
    if not custom and train.custom_loss_function_path is not None:
        problems.warn(f"--custom-loss-function-path has no effect with --loss-type {train.loss_type}")
    if train.loss_type == "policy_loss":
        if not train.compute_advantages_and_returns:
            problems.add(
                "--disable-compute-advantages-and-returns", "", "--loss-type policy_loss has nothing to train without them",
                "sft_loss and custom_loss work without",
            )  # fmt: skip
        return
    read = {"advantage_estimator", "use_kl_loss"} if custom else set()
    names = {f.name: flags.flag_name(f) for f in flags.flag_fields(TrainSettings)}
    idle = [names[name] for name in POLICY_ONLY if name in settings.given and name not in read]
    if idle:
        problems.warn(f"no effect with --loss-type {train.loss_type}: {', '.join(idle)}")


def _check_advantages(settings: Settings, problems: Problems) -> None:
    train = settings.train
    estimator = train.advantage_estimator
    if estimator in PENALISED and are_read(train) and not train.normalize_advantages:
        problems.add(
            "--advantage-estimator", estimator, "its advantages are meant to be whitened over the batch",
            "--normalize-advantages works with it",
        )  # fmt: skip
    idle = {
        "gamma": estimator != "reinforce_plus_plus",
        "grpo_std_normalization": estimator not in SCALED,
        "rewards_normalization": estimator not in BASELINED,
        "kl_coef": estimator not in PENALISED,
    }
    names = {f.name: flags.flag_name(f) for f in flags.flag_fields(TrainSettings)}
    for name, has_none in idle.items():
        if has_none and name in settings.given and getattr(train, name) != _default(name):
            problems.warn(f"{names[name]} has no effect with --advantage-estimator {estimator}")


def _default(name: str) -> object:
    return getattr(TrainSettings(), name)


def _check_kl(settings: Settings, problems: Problems) -> None:
    train = settings.train
    for flag, value in (("--kl-coef", train.kl_coef), ("--kl-loss-coef", train.kl_loss_coef)):
        if value < 0:
            problems.add(flag, value, "must not be negative", "0 or more works")
    if train.kl_coef and train.use_kl_loss and train.kl_loss_coef:
        problems.add(
            "--kl-coef", train.kl_coef,
            f"--kl-loss-coef {train.kl_loss_coef} holds the policy to the reference too, so it would count twice",
            "one of the two at 0 works",
        )  # fmt: skip
    if train.use_kl_loss and not train.kl_loss_coef:
        problems.warn("--use-kl-loss has no effect with --kl-loss-coef 0: no reference is loaded, nothing is measured")
    if not settings.uses_reference:
        given = [n for n in ("ref_update_interval", "kl_loss_type") if n in settings.given]
        idle = ["--" + n.replace("_", "-") for n in given if getattr(train, n) != _default(n)]
        if idle and not train.use_kl_loss:
            problems.warn(f"no effect without a KL term: {', '.join(idle)}")


def _check_hooks(train: TrainSettings, problems: Problems) -> None:
    corrects = train.use_tis or train.get_mismatch_metrics
    if train.get_mismatch_metrics and train.custom_tis_function_path is None:
        problems.add(
            "--get-mismatch-metrics", "", "the metrics are those of a function, and there is none",
            "--custom-tis-function-path works with it; train/train_rollout_kl is measured without",
        )  # fmt: skip
    if train.custom_tis_function_path is not None and not corrects:
        problems.warn("--custom-tis-function-path has no effect without --use-tis or --get-mismatch-metrics")
    for flag, path in (
        ("--custom-loss-function-path", train.custom_loss_function_path),
        ("--custom-tis-function-path", train.custom_tis_function_path),
        ("--custom-pg-loss-reducer-function-path", train.custom_pg_loss_reducer_function_path),
    ):
        try:
            load_function(path)
        except HookError as error:
            problems.add(flag, path, str(error), "give a path that can be imported here")


def _check_loss(train: TrainSettings, problems: Problems) -> None:
    if train.use_tis and train.use_rollout_logprobs:
        problems.add(
            "--use-tis", "", "corrects log-probs of the trainer's own, --use-rollout-logprobs uses the engine's instead",
            "leave one of the two out",
        )  # fmt: skip
    if train.eps_clip >= 1:
        problems.add("--eps-clip", train.eps_clip, "the lower bound of the ratio, 1 - it, must be above 0", "0.2 works")
    if train.eps_clip_c is not None and train.eps_clip_c <= 1:
        problems.add("--eps-clip-c", train.eps_clip_c, "must be above 1", "3 works")
    if not 0 <= train.tis_clip_low <= train.tis_clip:
        problems.add(
            "--tis-clip-low", train.tis_clip_low, f"must be between 0 and --tis-clip {train.tis_clip}", "0 works"
        )


def _check_correction(settings: Settings, problems: Problems) -> None:
    """The denominator of the ratio: async data is never left uncorrected, and what is chosen is said."""
    train, steps = settings.train, settings.optimizer_steps
    if train.loss_type != "policy_loss":
        return
    if "use_rollout_logprobs" in settings.given and not (train.use_rollout_logprobs or train.use_tis):
        problems.add(
            place("--no-use-rollout-logprobs", settings.sources["use_rollout_logprobs"]), "",
            f"{settings.mode} training on the trainer's own log-probs alone leaves the samples' older weights uncorrected",
            "--use-rollout-logprobs or --use-tis works",
        )  # fmt: skip
    elif settings.mode != "sync" and not (train.use_rollout_logprobs or train.use_tis):
        problems.note(
            "off-policy correction: the engine's log-probs are the denominator of the ratio (--use-rollout-logprobs); "
            "--use-tis takes the trainer's own, with truncated importance weights"
        )
    if steps > 1:
        problems.note(
            f"{steps} optimizer steps per batch: the last one trains samples that are {steps - 1} optimizer step(s) older "
            "than their weight version says"
        )
