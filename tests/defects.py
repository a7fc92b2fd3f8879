"""Planted defects: does a test fail when the code is wrong?

    python -m tests.defects --tests "tests/test_keys.py tests/test_methods.py" --output defects.md
    python -m tests.defects                              # every defect against the tests that should find it
    python -m tests.defects --tests tests --only "keys"  # those whose name or area has the word

Each defect is one replacement in one file. The checkout is copied, the defect put into the copy, and pytest run there,
first on the defect's likely tests, then with ``--tests``, until one fails: those of the first tier, then the thorough
ones. A table says which it was.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("cli", "client_app", "common", "data", "engine", "models", "results", "server_app", "strategies", "tests")
# The tiers in which a defect is looked for, in turn, and what the table says of them.
TIERS = {"not slow and not thorough": "", "thorough": " (thorough)"}
# Seconds for one call of pytest: a defect may make a test wait for ever.
PATIENCE = 900.0

TWO = "tests/test_ditto_apfl_pfedme.py"
STARTS = "tests/test_fedbabu_lg_fedavg_per_fedavg_fedala.py"
HEADS = "tests/test_fedpac_fedgh_gpfl.py"
GRAPHS = "tests/test_dfedavgm_dispfl.py"
COLLABORATORS = "tests/test_fedkd_fedcac_apple.py"
CRITICAL = "tests/test_criticalfl_fedpa.py"
KEYS, METHODS, PAPERS, LOSSES = (f"tests/test_{name}.py" for name in ("keys", "methods", "papers", "losses"))
STATE, RESUME, REPLIES, AGGREGATION = (
    f"tests/test_{name}.py" for name in ("state", "resume", "replies", "aggregation")
)
DATA, CONFIG, POLICY, HISTORY = (f"tests/test_{name}.py" for name in ("data", "config", "policy", "history"))
PRIVATE = "tests/test_privacy.py"
EVIDENCE, EXPERIMENTS, VERIFY = (f"tests/test_{name}.py" for name in ("evidence", "experiments", "verify"))
FORMULAS, NAMES, REPORT, REHEARSAL, ENGINE = (
    f"tests/test_{name}.py" for name in ("formulas", "names", "report", "rehearsal", "engine")
)


@dataclass(frozen=True)
class Defect:
    """One mistake in one file.

    Attributes:
        name: what is wrong.
        area: of the code.
        file: below the root.
        text: what is replaced; it must be there exactly once.
        by: what takes its place.
        likely: arguments of pytest that should find it, tried in turn before all others.
    """

    name: str
    area: str
    file: str
    text: str
    by: str
    likely: tuple[str, ...] = ()


def _of(area: str, file: str, *rows: tuple[str, str, str, str]) -> list[Defect]:
    """Return defects of a file: name, text, replacement, likely tests."""
    return [Defect(name, area, file, text, by, tuple(likely.split())) for name, text, by, likely in rows]


DEFECTS: list[Defect] = [
    *_of(
        "engine",
        "engine/grid.py",
        (
            "what a client keeps is forgotten",
            "            self._states[client] = answer.state\n",
            "            pass\n",
            ENGINE,
        ),
        (
            "an answer out of time ends the server",
            "if answer.number not in worker.tasks:",
            "if False:",
            f"{ENGINE}::test_an_answer_that_comes_when_its_time_has_run_out_is_passed_over",
        ),
        (
            "what a dead worker had begun is not given to another one",
            "                self._queue.appendleft(number)",
            "                pass",
            f"{ENGINE}::test_a_worker_that_is_killed_is_replaced_and_its_client_asked_again",
        ),
        (
            "arrays of the round before are taken for shared ones",
            "found = self._records[id(record)] = (self._numbers, record)",
            "found = self._records[id(record)] = (len(record), record)",
            ENGINE,
        ),
        (
            "states of a checkpoint are not brought back",
            "        self._states |= {int(name): state for name, state in states.items()}",
            "        pass",
            f"{ENGINE}::test_a_method_goes_on_from_its_checkpoint",
        ),
        (
            "a new worker is read from in the place of the one that ended",
            "elif key.fileobj is self._workers[key.data].connection:",
            "else:",
            "tests/test_engine.py::test_a_worker_that_is_replaced_while_the_server_is_busy_holds_nothing_up",
        ),
        (
            "a worker that is ended gets another message",
            "if not worker.tasks and not worker.killed and not",
            "if not worker.tasks and not",
            "tests/test_engine.py::test_an_answer_that_comes_when_its_time_has_run_out_is_passed_over",
        ),
    ),
    *_of(
        "engine",
        "client_app/client.py",
        (
            "the model of the client before is trained on",
            "        if initial:\n            for name, tensor in self.initial_model()",
            "        if not initial:\n            for name, tensor in self.initial_model()",
            ENGINE,
        ),
    ),
    *_of(
        "engine",
        "client_app/setting.py",
        (
            "another client's frozen layers stay frozen",
            "self._agreed.setup.model.requires_grad_(True).zero_grad()",
            "self._agreed.setup.model.zero_grad()",
            f"{ENGINE}::test_a_resident_model_has_no_traces_of_the_client_before",
        ),
    ),
    *_of(
        "aggregation",
        "strategies/core/aggregate.py",
        (
            "a reply's share is of the weight before it",
            "            self._weights[name] += weight\n            _move(",
            "            _move(",
            FORMULAS,
        ),
        ("the trimmed mean is cut at the lower end only", "block[cut : len(block) - cut]", "block[cut:]", AGGREGATION),
        (
            "the trimmed mean cuts one client more",
            "cut = math.floor(self._trim * len(block) + 1e-9)",
            "cut = math.ceil(self._trim * len(block) + 1e-9)",
            f"{KEYS}::test_the_aggregate_is_the_one_that_the_keys_name",
        ),
        ("the median is a mean", "np.median(block, axis=0)", "np.mean(block, axis=0)", AGGREGATION),
        (
            "key aggregation: trimmed mean for the median",
            '        "median": partial(Median, folder),\n',
            '        "median": partial(TrimmedMean, trim, folder),\n',
            f"{KEYS}::test_the_aggregate_is_the_one_that_the_keys_name",
        ),
        (
            "key trim is ignored",
            '"trimmed-mean": partial(TrimmedMean, trim, folder)',
            '"trimmed-mean": partial(TrimmedMean, 0.3, folder)',
            f"{KEYS}::test_the_aggregate_is_the_one_that_the_keys_name",
        ),
    ),
    *_of(
        "aggregation",
        "strategies/core/base.py",
        (
            "weights of samples are ignored",
            "return float(samples) if self.weighted and not self.protection else 1.0",
            "return 1.0",
            f"{PAPERS}::test_what_is_sent_next_is_the_mean_of_what_came",
        ),
        (
            "a tensor that nobody sent is forgotten",
            "return self.arrays | self._aggregate.result()",
            "return self._aggregate.result()",
            f"{METHODS}::test_a_class_that_nobody_sends_keeps_its_prototype",
        ),
        (
            "clipping looks at the extractor alone",
            "for group in reply.sizes.keys() - self.unclipped",
            'for group in {"extractor"} & reply.sizes.keys()',
            f"{KEYS}::test_the_aggregate_is_the_one_that_the_keys_name",
        ),
        (
            "a size is not divided by the root of the steps",
            "size / steps if group in self._moved else size",
            "size",
            f"{KEYS}::test_the_aggregate_is_the_one_that_the_keys_name",
        ),
        (
            "key aggregation: nothing is clipped",
            'if self.config.aggregation == "clipped-mean":',
            "if False:",
            f"{KEYS}::test_the_aggregate_is_the_one_that_the_keys_name",
        ),
    ),
    *_of(
        "aggregation",
        "strategies/core/update_norms.py",
        (
            "prototypes are not clipped",
            'if share is not None and array.dtype.kind == "f":',
            "if share is not None and name in known:",
            "tests/test_aggregation.py::test_prototypes_are_clipped",
        ),
    ),
    *_of(
        "rounds",
        "strategies/core/base.py",
        (
            "every round draws the same clients",
            'numpy_generator(self.config.seed, "sampling", server_round)',
            'numpy_generator(self.config.seed, "sampling")',
            f"{KEYS}::test_as_many_clients_are_drawn_as_participation_and_min_replies_say",
        ),
        (
            "a round with min-replies good replies is too few",
            "if not by_server and len(self.results) < self.config.min_replies:",
            "if not by_server and len(self.results) <= self.config.min_replies:",
            f"{METHODS}::test_too_few_good_replies_change_nothing",
        ),
        (
            "key min-replies: too few replies change the model",
            "if not by_server and len(self.results) < self.config.min_replies:",
            "if not by_server and len(self.results) < 1:",
            f"{METHODS}::test_too_few_good_replies_change_nothing",
        ),
        (
            "clients that were asked and were silent are evaluated",
            "known = self.results.keys() | self._silent",
            "known = self.results.keys()",
            f"{METHODS}::test_who_was_silent_is_not_asked_again_in_the_same_round",
        ),
        (
            "absent clients are never sent the global model",
            "return self.arrays if self.serves_global else {}",
            "return {}",
            f"{METHODS}::test_absent_clients_of_fedavg_are_given_the_global_model_to_evaluate",
        ),
        (
            "absent clients measure a model newer than the others do",
            "return to_record(self.aggregate()), self._means()",
            "self._set_arrays(to_record(self.aggregate()))\n        return self._record, self._means()",
            f"{METHODS}::test_a_global_model_is_measured_before_as_the_round_began_with_it",
        ),
    ),
    *_of(
        "rounds",
        "results/history.py",
        (
            "evaluate-every is off by one",
            "number % evaluate_every == 0",
            "number % evaluate_every == 1 % evaluate_every",
            f"{KEYS}::test_evaluate_every_and_the_last_round",
        ),
        (
            "the last round is not evaluated",
            "return number == planned or (evaluate_every > 0",
            "return (evaluate_every > 0",
            f"{KEYS}::test_evaluate_every_and_the_last_round",
        ),
    ),
    *_of(
        "rounds",
        "results/rundir.py",
        (
            "run directories are named by the clock of a time zone",
            ", time.gmtime())",
            ")",
            f"{RESUME}::test_the_latest_run_is_the_last_to_begin_when_clocks_go_back",
        ),
    ),
    *_of(
        "rounds",
        "server_app/rounds.py",
        (
            "checkpoint-every is off by one",
            "server_round % config.checkpoint_every == 0",
            "(server_round + 1) % config.checkpoint_every == 0",
            f"{RESUME}::test_checkpoints_that_are_rarer_than_rounds_and_crashes_that_are_not",
        ),
        (
            "no checkpoint after the last round",
            "(server_round % config.checkpoint_every == 0 or last)",
            "server_round % config.checkpoint_every == 0",
            f"{RESUME}::test_checkpoints_that_are_rarer_than_rounds_and_crashes_that_are_not",
        ),
        (
            "a round is run twice after a resume",
            "range(checkpoint.round + 1, config.rounds + 1)",
            "range(max(checkpoint.round, 1), config.rounds + 1)",
            f"{RESUME}::test_a_finished_run_can_be_made_longer",
        ),
        (
            "usual sizes are not restored",
            "    strategy.norms.load_state_dict(without_prefix(checkpoint.strategy, NORMS))\n",
            "",
            f"{AGGREGATION}::test_what_was_usual_before_a_resume_judges_the_round_after_it",
        ),
        (
            "clients are not told how far the server can go back",
            "        strategy.session.checkpointed = server_round\n",
            "",
            f"{RESUME}::test_checkpoints_that_are_rarer_than_rounds_and_crashes_that_are_not",
        ),
    ),
    *_of(
        "rounds",
        "server_app/app.py",
        (
            "clients are not told of the resume",
            "session.resumed = (*checkpoint.resumed, checkpoint.round)",
            "session.resumed = checkpoint.resumed",
            f"{RESUME}::test_clients_are_told_after_which_rounds_a_run_was_resumed",
        ),
        (
            "a simulation is resumed with other clients",
            "        if simulated and checkpoint:\n            _check_same_clients",
            "        if False:\n            _check_same_clients",
            f"{RESUME}::test_a_simulation_is_resumed_with_the_clients_that_it_had",
        ),
        (
            "on Ray a run that is resumed without checkpoints loses its personal models",
            "if simulated and (config.checkpoint_every or checkpoint) and not",
            "if simulated and config.checkpoint_every and not",
            f"{RESUME}::test_a_simulation_that_is_resumed_without_checkpoints_has_its_personal_models",
        ),
        (
            "a run that goes on keeps the summary of the shorter one",
            "        directory.reopen()\n",
            "",
            f"{RESUME}::test_a_run_that_goes_on_is_unfinished_until_its_new_end",
        ),
        (
            "a run that used no reply ends as if it had",
            "    _check_used(rounds)\n",
            "",
            f"{METHODS}::test_training_that_diverges_is_refused_and_loses_nothing",
        ),
        (
            "a personal model that did not come is passed over",
            "    return missing\n",
            "    return {}\n",
            "tests/test_runtime.py::test_a_personal_model_that_did_not_come_is_named",
        ),
    ),
    *_of(
        "checkpoint",
        "server_app/checkpoint.py",
        (
            "tensors come back in the order of their file",
            'arrays = {name: arrays[name] for name in content.get("order", arrays)}',
            "arrays = dict(arrays)",
            f"{RESUME}::test_the_noise_of_a_simulated_server_is_the_same_after_a_resume",
        ),
        ("one checkpoint is kept", "KEPT = 2", "KEPT = 1", f"{RESUME}::test_a_damaged_checkpoint_is_passed_over"),
        (
            "mail of an earlier round is taken for this one's",
            "if c in old and old[c].round == box.round",
            "if c in old",
            f"{RESUME}::test_files_of_mail_do_not_pile_up",
        ),
        (
            "the oldest checkpoint is read",
            "key=lambda path: natural_key(path.name), reverse=True)",
            "key=lambda path: natural_key(path.name))",
            f"{RESUME}::test_files_of_mail_do_not_pile_up",
        ),
    ),
    *_of(
        "checkpoint",
        "server_app/settings.py",
        (
            "lr may differ in a resumed run",
            '*("rounds", "evaluate-every",',
            '*("lr", "rounds", "evaluate-every",',
            f"{RESUME}::test_what_cannot_be_resumed_says_why_and_loses_nothing",
        ),
    ),
    *_of(
        "checkpoint",
        "common/durable.py",
        (
            "a file that was just renamed is written again",
            "free = os.path.samestat(there, new.lstat()) and stat.S_ISREG(there.st_mode)",
            "free = stat.S_ISREG(there.st_mode)",
            "tests/test_state.py::test_a_file_that_another_writer_has_just_renamed_is_not_written_again",
        ),
    ),
    *_of(
        "checkpoint",
        "server_app/settings.py",
        (
            "a run goes on with fewer rounds than it has",
            "if done > rounds or (done == rounds and",
            "if (done == rounds and",
            "tests/test_resume.py::test_no_run_goes_on_with_fewer_rounds_than_it_has",
        ),
    ),
    *_of(
        "state",
        "client_app/state.py",
        (
            "a round is trained on top of itself",
            "return version.round < self.round or (self.over",
            "return version.round <= self.round or (self.over",
            STATE,
        ),
        (
            "a future that a resume has undone still counts",
            "return self.made(version) and version.round <= self.undone_after(version)",
            "return self.made(version)",
            f"{STATE} {RESUME}",
        ),
        (
            "any undone round condemns: all in the place of any",
            "return min(self.resumed[version.attempt :], default=math.inf)",
            "return max(self.resumed[version.attempt :], default=math.inf)",
            f"{STATE}::test_each_resume_undoes_what_came_after_its_round",
        ),
        (
            "a start that was given up still counts",
            "if version.start and self.starts:",
            "if False:",
            f"{RESUME}::test_a_start_that_was_given_up_leaves_nothing",
        ),
        (
            "a milestone takes the place of the version that is asked for",
            "own = [version for version in self._versions if self._at.made(version)]\n        if own",
            "own = [version for version in self._versions if self._at.knows(version)]\n        if own",
            f"{RESUME}::test_a_client_without_the_version_that_is_asked_for_says_so",
        ),
        (
            "client-state=fresh goes on from other runs",
            "others = [] if at.fresh else",
            "others = [] if False else",
            f"{STATE}::test_a_new_run_goes_on_from_the_personal_model_or_starts_afresh",
        ),
        (
            "the version that a checkpoint may ask for goes",
            "needed = [version for version in (base, *safe[:1]) if version]",
            "needed = [version for version in (base,) if version]",
            f"{STATE} {RESUME}",
        ),
        (
            "a message without a version that fits starts anew",
            "if not past and before and not self._store.unreadable:",
            "if False:",
            STATE,
        ),
        (
            "a damaged version is used up to the last",
            "                continue\n            self._version = version\n",
            "            self._version = version\n",
            STATE,
        ),
        (
            "whoever is over its quota writes all the same",
            '        if size > most:\n            raise FloretError(\n                f"the personal state',
            '        if False:\n            raise FloretError(\n                f"the personal state',
            STATE,
        ),
    ),
    *_of(
        "state",
        "client_app/app.py",
        (
            "on Ray the exported model is of a round that a resume has undone",
            "ClientState(store, RoundContext.of(request.scalars, request.config, over=True))",
            "ClientState(store)",
            f"{RESUME}::test_the_personal_models_of_a_resumed_simulation_are_those_of_its_last_round",
        ),
    ),
    *_of(
        "state",
        "client_app/keeping.py",
        (
            "what the server of an ended run can go back to goes",
            "stay |= {number for line in safe for number in _resumable(lines[line])}",
            "pass",
            f"{RESUME}::test_another_run_in_between_takes_nothing_of_a_run_that_is_resumed",
        ),
        (
            "the last runs displace the first",
            "sorted(last)[: quota.runs]",
            "sorted(last, reverse=True)[: quota.runs]",
            STATE,
        ),
        (
            "the first line goes",
            "safe = [min(last), most, newest]",
            "safe = [most, newest]",
            f"{STATE}::test_a_quota_that_was_lowered_leaves_what_no_quota_takes",
        ),
    ),
    *_of(
        "parser",
        "common/config.py",
        (
            "what may be the lower bound must be above it",
            "(low < value if above else low <= value)",
            "(low < value)",
            CONFIG,
        ),
        (
            "an upper bound is not looked at",
            "fine = (low < value if above else low <= value) and value <= high",
            "fine = low < value if above else low <= value",
            CONFIG,
        ),
        (
            "true is a whole number",
            "if type(value) is not kind or value != value:",
            "if not isinstance(value, kind) or value != value:",
            CONFIG,
        ),
        ("NaN is a number", "if type(value) is not kind or value != value:", "if type(value) is not kind:", CONFIG),
        (
            "the fractions may leave nothing to train on",
            "if self.validation_fraction + self.test_fraction > 0.95 + 1e-9:",
            "if self.validation_fraction > 0.95 + 1e-9:",
            CONFIG,
        ),
        (
            "a number of hundreds of digits is a traceback",
            "        except OverflowError as error:",
            "        except ZeroDivisionError as error:",
            "tests/test_config.py::test_a_number_of_many_digits_is_one_line",
        ),
    ),
    *_of(
        "parser",
        "common/yamlfile.py",
        (
            "YAML may make Python objects",
            "class _Loader(yaml.SafeLoader):",
            "class _Loader(yaml.UnsafeLoader):",
            f"{CONFIG}::test_a_yaml_file_makes_no_objects_and_no_traceback",
        ),
        (
            "text that is not UTF-8 is a crash",
            "except (yaml.YAMLError, UnicodeDecodeError) as error:",
            "except yaml.YAMLError as error:",
            f"{CONFIG}::test_a_yaml_file_makes_no_objects_and_no_traceback",
        ),
        (
            "a key that stands twice takes the last value",
            "            if what in lines:",
            "            if False:",
            "tests/test_config.py::test_a_key_that_stands_twice_is_refused",
        ),
        (
            "a number that begins with 0 is a number",
            '"tag:yaml.org,2002:int": r"[-+]?(0|[1-9][0-9]*)$"',
            '"tag:yaml.org,2002:int": r"[-+]?[0-9]+$"',
            "tests/test_config.py::test_numbers_of_a_yaml_file_are_the_decimal_ones",
        ),
    ),
    *_of(
        "parser",
        "data/npz.py",
        ("labels below 0 are taken", "if y.min() < 0 or y.max() >= MAX_CLASSES:", "if y.max() >= MAX_CLASSES:", DATA),
        (
            "x and y may differ in length",
            '    if n != len(y):\n        raise DataError(f"{path}: {x_name} has',
            '    if n < len(y):\n        raise DataError(f"{path}: {x_name} has',
            DATA,
        ),
        ("colours last stay last", "x = x.transpose(0, 3, 1, 2)", "x = x.reshape(len(x), -1, *x.shape[1:3])", DATA),
        ("a label that is too large is taken", "largest >= num_classes:", "largest > num_classes:", DATA),
    ),
    *_of(
        "parser",
        "cli/paths.py",
        (
            "an empty path is the working directory",
            "if not os.fspath(value):",
            "if False:",
            "tests/test_config.py::test_no_path_may_be_empty",
        ),
    ),
    *_of(
        "parser",
        "server_app/settings.py",
        (
            "a key of a method's table that it has not is taken",
            '    check_known(own, known, f"the Parameters of {config.method}", "docs/methods.md")\n',
            "",
            "tests/test_config.py::test_a_table_of_defaults_that_is_not_that_of_the_method",
        ),
    ),
    *_of(
        "data",
        "data/clients.py",
        (
            "validation-fraction is of the whole pool",
            "validation = min(round(len(order) * self.validation_fraction)",
            "validation = min(round(n * self.validation_fraction)",
            DATA,
        ),
        (
            "training and validation overlap by one",
            "return order[validation:], order[:validation]",
            "return order[max(validation - 1, 0) :], order[:validation]",
            DATA,
        ),
        (
            "a label below 0 is one of the run's classes",
            "return (y >= 0) & (y < num_classes)",
            "return y < num_classes",
            "tests/test_data.py::test_silently_a_label_that_the_run_does_not_have_is_passed_over",
        ),
    ),
    *_of(
        "data",
        "data/partition.py",
        (
            "a partition does not depend on the seed",
            'seed = derive_seed(scheme.seed, "partition", attempt)',
            'seed = derive_seed(0, "partition", attempt)',
            DATA,
        ),
        (
            "min-samples is of all but one",
            "return max(self.min_samples, 2)",
            "return max(self.min_samples - 1, 2)",
            DATA,
        ),
        (
            "a client of the extreme split takes its neighbour's samples",
            "parts[i] = pooled[place :: len(members)]",
            "parts[i] = pooled[:: len(members)]",
            DATA,
        ),
        (
            "key alpha is ignored",
            "            config.alpha,\n",
            "            0.1,\n",
            f"{KEYS}::test_keys_of_partitions",
        ),
        (
            "key shards-per-client is ignored",
            "            config.shards_per_client,\n",
            "            2,\n",
            f"{KEYS}::test_keys_of_partitions",
        ),
        (
            "pfllib gives samples to clients above the mean size",
            "len(part) < len(labels) / num_clients for part in parts",
            "True for part in parts",
            "tests/test_data.py::test_pfllib_makes_the_clients_that_pfllib_publishes",
        ),
        (
            "each draw of pfllib begins the generator anew",
            "        parts = [labels[:0]] * num_clients\n        for label",
            "        self._random.seed(1)\n        parts = [labels[:0]] * num_clients\n        for label",
            "tests/test_data.py::test_pfllib_draws_again_from_the_same_generator",
        ),
        (
            "dirichlet-balanced balances nothing",
            'balanced = scheme.name == "dirichlet-balanced"',
            "balanced = False",
            "tests/test_data.py::test_balanced_dirichlet_divides_the_first_class_as_dirichlet_does",
        ),
        (
            "key classes-per-client is ignored",
            "            config.classes_per_client,\n",
            "            2,\n",
            f"{KEYS}::test_keys_of_partitions",
        ),
        (
            "key min-samples is ignored",
            "            config.min_samples,\n",
            "            1,\n",
            f"{KEYS}::test_min_samples_of_a_run",
        ),
    ),
    *_of(
        "data",
        "data/datasets.py",
        (
            "max-samples keeps the first samples",
            "choice(n, source.max_samples, replace=False))",
            "choice(source.max_samples, source.max_samples, replace=False))",
            DATA,
        ),
        (
            "key class-names is ignored",
            "            config.class_names,\n",
            '            "",\n',
            "tests/test_data_images.py",
        ),
        (
            "key image-size is ignored",
            "            config.image_size,\n",
            "            0,\n",
            f"{KEYS}::test_keys_of_images",
        ),
        (
            "key image-channels is ignored",
            "            config.image_channels,\n",
            "            0,\n",
            f"{KEYS}::test_keys_of_images",
        ),
        (
            "key download is ignored",
            "if missing and not (download and official.kind):",
            "if missing:",
            f"{KEYS}::test_download_fetches_what_is_not_there",
        ),
        (
            "key num-classes is ignored",
            "            config.num_classes,\n",
            "            0,\n",
            f"{DATA}::test_num_classes_is_taken_or_refused",
        ),
        (
            "a label of a damaged file makes a class",
            "        if largest >= classes:",
            "        if largest > 255:",
            "tests/test_data.py::test_a_bit_of_a_label_that_flipped_makes_no_classes",
        ),
    ),
    *_of(
        "data",
        "data/images.py",
        (
            "a PNG of 16 bits a colour is cut off to 8",
            "depth = content.read(25)[24]",
            "depth = content.read(25)[24] % 16",
            "tests/test_data_images.py::test_more_than_eight_bits_of_a_colour_are_not_cut_off",
        ),
        (
            "memory is asked for one image",
            "    size, room = n * bytes_each, available_memory()",
            "    size, room = bytes_each, available_memory()",
            "tests/test_data_images.py::test_more_images_than_there_is_memory_for_are_refused",
        ),
        (
            "a damaged cache of images is taken",
            "    if _about(pixels) != about:",
            "    if False:",
            "tests/test_data_images.py::test_a_damaged_cache_of_decoded_images_is_decoded_anew",
        ),
    ),
    *_of(
        "data",
        "data/npz.py",
        (
            "a protected node tells of a label that no class has",
            "if len(y) == 0 or strays:",
            "if len(y) == 0:",
            "tests/test_data.py::test_silently_a_label_that_the_run_does_not_have_is_passed_over",
        ),
        (
            "an array of a hundred dimensions is read",
            "if len(shape) > _MOST_DIMENSIONS or not all(",
            "if not all(",
            "tests/test_data.py::test_a_header_that_no_array_has_is_one_line_and_takes_no_memory",
        ),
        (
            "of no sample no room is asked for",
            "math.prod(max(n, 1) for n in shape)",
            "math.prod(shape)",
            "tests/test_data.py::test_a_header_that_no_array_has_is_one_line_and_takes_no_memory",
        ),
        (
            "an array that is there twice is read",
            "        if file.files.count(name) > 1:",
            "        if file.files.count(name) > 2:",
            "tests/test_data.py::test_an_array_that_is_there_twice_is_refused",
        ),
    ),
    *_of(
        "training",
        "client_app/client.py",
        (
            "accuracy is measured in training mode",
            "model = self.serving().eval()",
            "model = self.serving()",
            f"{METHODS}::test_accuracies_are_measured_in_evaluation_mode",
        ),
        (
            "accuracy is measured in bfloat16",
            "            right = sum((model(batch.x)",
            "          with self.autocast():\n            right = sum((model(batch.x)",
            "tests/test_precision.py",
        ),
        (
            "a tensor that is not finite is kept",
            "        self._check_finite({name",
            "        dict({name",
            f"{METHODS}::test_training_that_diverges_is_refused_and_loses_nothing",
        ),
        (
            "finite if any value is",
            "finite = {name: torch.isfinite(tensor).all()",
            "finite = {name: torch.isfinite(tensor).any()",
            f"{KEYS}::test_one_value_that_is_not_finite_is_divergence",
        ),
        (
            "the historical extractor is that which was received",
            "return self.frozen_extractor() if self.setting.state.round else None",
            "return self.frozen_extractor()",
            f"{PAPERS}::test_the_historical_extractor_is_that_of_the_last_round_taken_part_in",
        ),
    ),
    *_of(
        "training",
        "client_app/training.py",
        (
            "key momentum is ignored",
            "momentum=self.config.momentum if momentum is None else momentum",
            "momentum=0.9 if momentum is None else momentum",
            f"{KEYS}::test_every_optimizer_of_a_method_goes_by_the_keys",
        ),
        (
            "key weight-decay is ignored",
            "weight_decay=self.config.weight_decay if weight_decay is None else weight_decay",
            "weight_decay=0.0005 if weight_decay is None else weight_decay",
            f"{KEYS}::test_every_optimizer_of_a_method_goes_by_the_keys",
        ),
        (
            "lr-decay raised to one power more",
            'decayed(self.config.lr, self.message["round"])',
            'decayed(self.config.lr, self.message["round"] + 1)',
            f"{KEYS}::test_lr_decay_is_of_the_rounds_before",
        ),
        (
            "a message says the learning rate",
            "lr=self.lr if lr is None else lr",
            'lr=self.message.get("lr", self.lr) if lr is None else lr',
            "tests/test_policy.py::test_a_message_does_not_say_at_which_rate_a_client_trains",
        ),
        (
            "the optimizer takes lr without its decay",
            "lr=self.lr if lr is None else lr",
            "lr=self.config.lr if lr is None else lr",
            f"{KEYS}::test_every_optimizer_of_a_method_goes_by_the_keys",
        ),
        (
            "momentum of the second phase is left out",
            "momentum=phase.momentum, weight_decay=phase.weight_decay)\n            for phase in phases",
            "momentum=0.0 if phase is not phases[0] else phase.momentum, weight_decay=phase.weight_decay)\n"
            "            for phase in phases",
            f"{KEYS}::test_every_optimizer_of_a_method_goes_by_the_keys",
        ),
        (
            "only one phase's parameters are frozen",
            "everything.difference(phase.parameters)) for phase in phases]",
            "[]) for phase in phases]",
            f"{LOSSES}::test_a_phase_freezes_what_is_not_its_own",
        ),
        (
            "key batch-size is ignored",
            "epoch(self.data.train, self.config.batch_size, self.order",
            "epoch(self.data.train, 32, self.order",
            f"{KEYS}::test_a_round_is_that_of_a_plain_loop",
        ),
        (
            "the loss is the last batch's",
            "total += step(batch).detach()",
            "total = step(batch).detach()",
            f"{KEYS}::test_a_round_is_that_of_a_plain_loop",
        ),
        (
            "every step waits for the device",
            "total += step(batch).detach()",
            "total += step(batch).detach().item()",
            f"{REHEARSAL}::test_more_batches_and_epochs_do_not_wait_more_often",
        ),
        (
            "a cached teacher mixes up its samples",
            "return lambda batch: [take(tensor, batch.index) for tensor in cached]",
            "return lambda batch: [tensor[: len(batch.y)] for tensor in cached]",
            f"{KEYS}::test_a_loss_has_the_weights_of_the_keys",
        ),
        (
            "batches of every round have one order",
            'purpose, self.setting.name, self.message["round"])',
            "purpose, self.setting.name)",
            f"{KEYS}::test_the_order_of_batches_is_new_in_every_round",
        ),
    ),
    *_of(
        "training",
        "common/prototypes.py",
        (
            "prototypes are made on the CPU",
            "rows = torch.zeros(classes, width, device=device)",
            "rows = torch.zeros(classes, width)",
            f"{REHEARSAL}::test_a_message_gives_on_the_device_what_it_gives_on_the_cpu",
        ),
        (
            "samples of unknown classes are aligned to zero",
            " * known[labels].unsqueeze(1)).square()",
            ").square()",
            FORMULAS,
        ),
        (
            "alignment: mean and sum are exchanged",
            'squared.sum(1).mean() if reduction == "sum" else squared.mean()',
            'squared.mean() if reduction == "sum" else squared.sum(1).mean()',
            FORMULAS,
        ),
    ),
    *_of(
        "training",
        "common/sgd.py",
        (
            "weight decay is ignored",
            "weight_decay=self._weight_decay,",
            "weight_decay=0.0,",
            "tests/test_runtime.py::test_sgd_is_that_of_pytorch",
        ),
        (
            "the momentum's buffer is lost",
            "            self._buffers[i] = buffer\n",
            "            pass\n",
            "tests/test_runtime.py::test_sgd_is_that_of_pytorch",
        ),
    ),
    *_of(
        "training",
        "client_app/runtime.py",
        (
            "key threads is ignored",
            "torch.set_num_threads(config.threads)",
            "torch.set_num_threads(1)",
            f"{KEYS}::test_threads_of_a_client",
        ),
        (
            "key precision: auto is float32",
            "return torch.bfloat16 if native else torch.float32",
            "return torch.float32",
            "tests/test_precision.py",
        ),
    ),
    *_of(
        "methods",
        "client_app/methods/fedrep.py",
        (
            "key fedrep.head-epochs is ignored",
            "self.run_epochs(self.parameters.head_epochs,",
            "self.run_epochs(self.config.local_epochs,",
            f"{KEYS}::test_a_round_is_that_of_a_plain_loop",
        ),
        (
            "key fedrep.every-batch is ignored",
            "if self.parameters.every_batch:",
            "if False:",
            f"{KEYS}::test_a_round_goes_so_often_through_the_data",
        ),
    ),
    *_of(
        "methods",
        "client_app/methods/fedprox.py",
        ("FedProx without the half", "return mu / 2 * torch", "return mu * torch", FORMULAS),
    ),
    *_of(
        "methods",
        "client_app/methods/fedproto.py",
        (
            "key fedproto.lambda is ignored",
            "return loss + self.parameters.lambda_ * alignment",
            "return loss + alignment",
            f"{KEYS}::test_a_loss_has_the_weights_of_the_keys",
        ),
        (
            "key fedproto.inference is ignored",
            'if self.parameters.inference == "head" or not known.any():',
            "if not known.any():",
            f"{KEYS}::test_fedproto_predicts_by_what_inference_says",
        ),
        (
            "FedProto: own-prototype is prototype",
            'if self.parameters.inference == "own-prototype" and CLASSES in self.memory:',
            "if False:",
            f"{KEYS}::test_fedproto_may_predict_among_its_own_classes_alone",
        ),
        (
            "FedProto predicts by the head until all classes are known: all in the place of any",
            "or not known.any():",
            "or not known.all():",
            f"{KEYS}::test_fedproto_predicts_by_what_inference_says",
        ),
    ),
    *_of(
        "methods",
        "client_app/methods/fedcpd.py",
        (
            "key fedcpd.every-batch is ignored",
            "if self.parameters.every_batch:",
            "if True:",
            f"{KEYS}::test_a_round_goes_so_often_through_the_data",
        ),
        ("FedCPD: alpha is ignored", "loss + own.alpha * alignment", "loss + alignment", f"{LOSSES}::test_fedcpd"),
        ("FedCPD: beta is ignored", "loss + own.beta * contrast", "loss + contrast", f"{LOSSES}::test_fedcpd"),
        (
            "FedCPD: gamma is ignored",
            "loss + own.gamma * distillation",
            "loss + distillation",
            f"{LOSSES}::test_fedcpd",
        ),
        ("FedCPD: tau multiplies", "own @ others.T / tau", "own @ others.T * tau", f"{PAPERS}::test_contrast_by_hand"),
        (
            "FedCPD waits for the device in every batch",
            "if own.contrast and self._any_known:",
            "if own.contrast and self._prototypes[1].any():",
            f"{REHEARSAL}::test_more_batches_and_epochs_do_not_wait_more_often",
        ),
        (
            "FedCPD: the teacher is the received extractor",
            "        self._teacher = self.historical_extractor()\n        super().receive()\n",
            "        super().receive()\n        self._teacher = self.historical_extractor()\n",
            f"{LOSSES}::test_fedcpd",
        ),
    ),
    *_of(
        "methods",
        "strategies/fedcpd.py",
        (
            "key fedcpd.fusion-width is ignored",
            "Distillation(setup.stage_channels, own.fusion_width, raw)",
            "Distillation(setup.stage_channels, 32, raw)",
            f"{KEYS}::test_fusion_width_is_that_of_the_fused_maps",
        ),
        (
            "key fedcpd.teacher-maps is ignored",
            'raw = own.teacher_maps == "raw"',
            "raw = False",
            f"{LOSSES}::test_fedcpd",
        ),
    ),
    *_of(
        "methods",
        "client_app/methods/feddfpa.py",
        (
            "FedDFPA: historical-weight is ignored",
            "loss = loss + self.parameters.historical_weight * direction",
            "loss = loss + 0.5 * direction",
            f"{KEYS}::test_a_loss_has_the_weights_of_the_keys",
        ),
        (
            "FedDFPA: align-reduction is ignored",
            "*self._global, self.parameters.align_reduction)",
            '*self._global, "mean")',
            f"{KEYS}::test_a_loss_has_the_weights_of_the_keys",
        ),
        (
            "FedDFPA fuses rows of other classes",
            "weight = torch.where(has, coefficients, torch.ones_like(coefficients))",
            "weight = coefficients",
            f"{PAPERS}::test_rows_of_own_classes_are_fused_and_the_others_stay",
        ),
        (
            "FedDFPA: the historical prototypes are those of this round",
            "self._historical = self.known_prototypes(self.memory)\n        if self",
            "self._historical = self.known_prototypes(self.local_prototypes())\n        if self",
            f"{LOSSES}::test_feddfpa",
        ),
        (
            "key feddfpa.prototypes-after-training is ignored",
            "if self.parameters.prototypes_after_training:",
            "if False:",
            f"{LOSSES}::test_feddfpa_takes_prototypes_before_or_after_training",
        ),
    ),
    *_of(
        "methods",
        "client_app/methods/pfakd.py",
        (
            "key pfakd.attention-weight is ignored",
            "loss + own.attention_weight * attention_loss",
            "loss + attention_loss",
            f"{KEYS}::test_a_loss_has_the_weights_of_the_keys",
        ),
        (
            "key pfakd.beta is ignored",
            "loss + own.beta * distillation",
            "loss + distillation",
            f"{KEYS}::test_a_loss_has_the_weights_of_the_keys",
        ),
        (
            "key pfakd.distill-reduction is ignored",
            "received, own.distill_reduction)",
            'received, "mean")',
            f"{KEYS}::test_a_loss_has_the_weights_of_the_keys",
        ),
    ),
    *_of(
        "methods",
        "client_app/methods/pfps_lwc.py",
        (
            "key pfps-lwc.recall-epochs is ignored",
            "self.run_alternating(own.recall_epochs,",
            "self.run_alternating(1,",
            f"{KEYS}::test_a_round_goes_so_often_through_the_data",
        ),
        (
            "key pfps-lwc.recall-lr is ignored",
            "if own.recall_lr else None",
            "if False else None",
            "tests/test_losses.py::test_pfps_lwc",
        ),
        (
            "the norm of the head is squared",
            "return norm",
            "return norm.square()",
            f"{PAPERS}::test_head_norm_is_not_squared_and_has_a_gradient_at_zero",
        ),
        (
            "key pfps-lwc.lambda is ignored",
            "loss + self.parameters.lambda_ * head_norm",
            "loss + 0.02 * head_norm",
            f"{KEYS}::test_a_loss_has_the_weights_of_the_keys",
        ),
    ),
    *_of(
        "methods",
        "client_app/methods/ua_pdfl.py",
        (
            "key ua-pdfl.client-dropout is ignored",
            "if self.parameters.client_dropout and all(",
            "if all(",
            f"{KEYS}::test_ua_pdfl_asks_by_the_divergence_of_the_key",
        ),
        (
            "UA-PDFL: th is compared the wrong way",
            "if value < th]",
            "if value > th]",
            f"{PAPERS}::test_ua_pdfl_sends_only_what_was_asked_for",
        ),
        (
            "UA-PDFL drops out if any peer is near: any in the place of all",
            "and all(value <= th for value in values):",
            "and any(value <= th for value in values):",
            f"{PAPERS}::test_ua_pdfl_takes_a_peers_model_only_where_all_are_near",
        ),
        (
            "key ua-pdfl.divergence is ignored",
            'if kind == "jensen-shannon":',
            "if False:",
            f"{PAPERS}::test_divergence_by_hand",
        ),
        (
            "UA-PDFL asks by symmetric KL alone",
            "probabilities(peers[i][UNIT]), self.parameters.divergence))",
            'probabilities(peers[i][UNIT]), "symmetric-kl"))',
            f"{KEYS}::test_ua_pdfl_asks_by_the_divergence_of_the_key",
        ),
        (
            "key ua-pdfl.aux-reduction is ignored",
            "self._average, self.parameters.aux_reduction)",
            'self._average, "sum")',
            f"{KEYS}::test_a_loss_has_the_weights_of_the_keys",
        ),
        (
            "UA-PDFL leaves itself out of the average",
            "torch.stack([own, *auxiliaries]).mean(0)",
            "torch.stack(auxiliaries).mean(0)",
            f"{LOSSES}::test_ua_pdfl",
        ),
        (
            "UA-PDFL weighs peers alike",
            "weights = [len(self.data.train), *(samples[i] for i in theirs)]",
            "weights = [1, *(1 for i in theirs)]",
            f"{PAPERS}::test_ua_pdfl_below_every_divergence_is_a_decentralised_fedper",
        ),
        (
            "UA-PDFL: peers weigh by any number",
            "not all(type(count) is int and count > 0 for count in samples)",
            "False",
            "tests/test_papers.py::test_ua_pdfl_weighs_no_peer_by_what_is_no_number_of_samples",
        ),
    ),
    *_of(
        "methods",
        "strategies/ua_pdfl.py",
        (
            "key ua-pdfl.n-com is ignored",
            "size=min(self.parameters.n_com, len(others))",
            "size=min(5, len(others))",
            f"{PAPERS}::test_ua_pdfl_below_every_divergence_is_a_decentralised_fedper",
        ),
        (
            "a client is its own peer",
            " and other.name != client.name]",
            "]",
            f"{PAPERS}::test_ua_pdfl_below_every_divergence_is_a_decentralised_fedper",
        ),
        (
            "a peer that is not there can be asked for",
            "-1 <= index < peers for",
            "-1 <= index for",
            f"{PAPERS}::test_a_request_for_a_peer_that_is_not_there_is_refused",
        ),
    ),
    *_of(
        "replies",
        "strategies/core/replies.py",
        (
            "more samples than declared are believed",
            "    if samples > declared:\n",
            "    if False:\n",
            f"{REPLIES} {AGGREGATION} {NAMES}",
        ),
        (
            "no samples are a number of samples",
            "or samples < 1:",
            "or samples < 0:",
            f"{METHODS}::test_a_bad_reply_is_refused_and_the_round_goes_on",
        ),
        (
            "an accuracy above 1 is taken",
            'number(f"metric {name}", record[name], 0, 1)',
            'number(f"metric {name}", record[name], 0, 2)',
            REPLIES,
        ),
        (
            "a loss that is not finite is taken",
            'number("metric loss", record["loss"], -LARGEST_LOSS, LARGEST_LOSS)',
            'float(record["loss"])',
            f"{METHODS}::test_a_bad_reply_is_refused_and_the_round_goes_on",
        ),
    ),
    *_of(
        "replies",
        "common/tensors.py",
        (
            "types of tensors are not compared",
            "if str(dtype) != spec.dtype or not",
            "if not",
            f"{METHODS}::test_a_bad_reply_is_refused_and_the_round_goes_on",
        ),
        (
            "a tensor may be missing",
            "if name not in there and not spec.optional:",
            "if False:",
            f"{METHODS}::test_a_bad_reply_is_refused_and_the_round_goes_on",
        ),
    ),
    *_of(
        "replies",
        "common/wire.py",
        (
            "a tensor with one finite value is finite",
            "np.isfinite(array.sum()) or np.isfinite(array).all()",
            "np.isfinite(array).any()",
            f"{METHODS}::test_a_bad_reply_is_refused_and_the_round_goes_on",
        ),
        (
            "key wire is ignored",
            'return wire if spec.dtype == "float32" else spec.dtype',
            "return spec.dtype",
            f"{KEYS}::test_keys_of_the_model_say_what_travels",
        ),
        (
            "a variance may be below zero",
            "if not spec.negative and (found < 0).any():",
            "if False:",
            "tests/test_aggregation.py::test_a_variance_below_zero_is_refused_on_both_sides",
        ),
    ),
    *_of(
        "replies",
        "strategies/core/update_norms.py",
        ("nothing is absurd", "ABSURD = 20.0", "ABSURD = 1e60", AGGREGATION),
        (
            "who still learns is refused when the others have learned",
            "_LEAST_USUAL = 5e-3",
            "_LEAST_USUAL = 1e-3",
            AGGREGATION,
        ),
        (
            "what is usual is the largest",
            "return {client: median(one) for client, one in sizes.items()}",
            "return {client: max(one) for client, one in sizes.items()}",
            AGGREGATION,
        ),
        (
            "a network that nobody trained says what is usual",
            "        if self._groups is None:\n            if changed",
            "        if False:\n            if changed",
            f"{AGGREGATION}::test_what_is_usual_and_what_is_absurd",
        ),
    ),
    *_of(
        "replies",
        "strategies/core/roster.py",
        (
            "whoever declares a billion samples counts for them",
            "return min(samples, int(most * self._median))",
            "return samples",
            f"{AGGREGATION}::test_who_declares_a_billion_samples_does_not_count_for_them",
        ),
        (
            "names that a node had before count for the median of samples",
            "for client in self.present() or self)",
            "for client in self)",
            f"{AGGREGATION}::test_who_declares_a_billion_samples_does_not_count_for_them",
        ),
        (
            "another state directory gets the name",
            "known.identity and client.identity != known.identity:",
            "known.identity and not client.identity:",
            NAMES,
        ),
        (
            "another key gets the name",
            "        if client.key != known.key:\n",
            "        if not client.key:\n",
            f"{NAMES}::test_another_key_under_a_name_is_refused_while_its_owner_is_away",
        ),
    ),
    *_of(
        "policy",
        "client_app/policy.py",
        (
            "prototypes of rare classes leave",
            ">= self.policy.min_class_samples:",
            ">= 0:",
            f"{POLICY}::test_prototypes_of_rare_classes_stay",
        ),
        ("accuracies on few samples leave", "or self._samples[of] < self.policy.hidden_below:", "or False:", POLICY),
        ("rounded accuracies are exact", "if self.policy.accuracies == ROUNDED:", "if False:", POLICY),
        (
            "more rounds than permitted: one too many",
            "if rounds > self.max_rounds_a_day:",
            "if rounds > self.max_rounds_a_day + 1:",
            POLICY,
        ),
        (
            "methods that are not permitted run",
            "if ALL not in permitted and name not in permitted:",
            "if ALL not in permitted and name in permitted:",
            POLICY,
        ),
        (
            "the size of images is not bounded",
            '        self._bound("max-image-size", "image-size", config.image_size)\n',
            "",
            POLICY,
        ),
        ("what may not leave does", "            if kind not in permitted:\n", "            if False:\n", POLICY),
        (
            "noise by the server takes the place of samples",
            "if config.privacy.on and not config.privacy.by_server:",
            "if config.privacy.on:",
            "tests/test_policy.py::test_noise_by_the_server_takes_the_place_of_no_samples",
        ),
        (
            "a step that is not made counts",
            "max(1, batches + (rest >= max(2, self.min_batch_size)))",
            "max(1, batches + (rest > 0))",
            "tests/test_policy.py::test_a_step_that_batch_normalisation_does_not_make_is_not_counted",
        ),
        (
            "what peers sent is not bounded",
            "if size > self.max_received_mb * 1e6:",
            "if False:",
            "tests/test_policy.py::test_what_peers_sent_is_bounded_before_it_is_unpacked",
        ),
    ),
    *_of(
        "policy",
        "client_app/audit.py",
        (
            "a renamed audit file takes another client's place",
            'path.with_name(f"{path.name}.1")',
            'path.with_suffix(".1.jsonl")',
            "tests/test_policy.py::test_a_full_audit_file_takes_no_other_clients_place",
        ),
        (
            "refusals push out what left",
            "path = self._others if uncounted else self._rounds",
            "path = self._rounds",
            "tests/test_policy.py::test_a_server_cannot_push_lines_out_of_the_audit_file",
        ),
        (
            "a line of the audit file is glued to one that a full disk cut short",
            '"\\n" * _ends_within_a_line(path) + text',
            "text",
            "tests/test_policy.py::test_a_line_that_a_full_disk_cut_short_takes_no_other_with_it",
        ),
    ),
    *_of(
        "policy",
        "client_app/app.py",
        (
            "fewer classes than the client has are taken",
            "if classes < self.data.num_classes:",
            "if False:",
            "tests/test_policy.py::test_no_error_tells_a_label_or_a_path",
        ),
        (
            "the server is told what nobody expected",
            "return own and (isinstance(error, DataError) or not isinstance(error, FloretError))",
            "return own and isinstance(error, DataError)",
            "tests/test_policy.py::test_no_error_tells_a_label_or_a_path",
        ),
    ),
    *_of(
        "figures",
        "results/history.py",
        (
            "the worst decile is the best",
            "np.sort(values)[: math.ceil(len(values) / 10)]",
            "np.sort(values)[-math.ceil(len(values) / 10) :]",
            FORMULAS,
        ),
        ("the weighted mean is the mean", "np.average(values, weights=samples)", "np.average(values)", FORMULAS),
        (
            "the best round is the best on test",
            'return highest(self.complete_rounds("after", "validation"), "validation")',
            'return highest(self.complete_rounds("after", "validation"), "test")',
            f"{HISTORY} {REPORT}",
        ),
        (
            "of equal rounds the last is the best",
            "return max(rounds, key=",
            "return max(reversed(rounds), key=",
            f"{HISTORY} {REPORT}",
        ),
        (
            "bytes up and down are exchanged",
            "Traffic(sum(part.up for part in listed), sum(part.down for part in listed))",
            "Traffic(sum(part.down for part in listed), sum(part.up for part in listed))",
            HISTORY,
        ),
        (
            "a killed run is quoted by its last round",
            "last = self.rounds[-1] if ended else self.last_complete()",
            "last = self.rounds[-1]",
            HISTORY,
        ),
    ),
    *_of(
        "figures",
        "results/run.py",
        (
            "the headline is over all clients, whoever was measured",
            "if 0 < measured < known else",
            "if False else",
            "tests/test_report.py::test_the_headline_says_how_many_of_the_clients_it_is_of",
        ),
        (
            "own data are called the run's dataset",
            "    if not own:\n        return words\n",
            "    if True:\n        return words\n",
            "tests/test_history.py::test_data_of_the_nodes_are_not_called_those_of_the_run",
        ),
    ),
    *_of(
        "figures",
        "results/report.py",
        (
            "a comparison says nothing of means over some of the clients",
            '    return "\\n".join([_aligned(rows), *over, *telling, *spent])',
            '    return "\\n".join([_aligned(rows), *telling, *spent])',
            "tests/test_methods.py::test_a_client_that_goes_away_is_told_and_the_figures_say_over_whom_they_are",
        ),
    ),
    *_of(
        "delivery",
        "server_app/delivery.py",
        (
            "a lost message is never sent again",
            "        if reply is None:\n            self._resend(item, item.node, now)\n",
            "",
            NAMES,
        ),
        (
            "return-timeout is ignored",
            "late = now - since >= self._federation.config.return_timeout",
            "late = now - since >= 60.0",
            f"{NAMES}::test_a_message_to_a_node_that_is_another_client_now_is_not_sent_to_it_again",
        ),
        (
            "a message goes to a node that is unsure",
            "if there and (client.node_id not in roster.unsure or (late and not begun)):",
            "if there:",
            NAMES,
        ),
        (
            "other clients that came back wait for their turn",
            "        self._look_after_others(item, now)\n",
            "",
            "tests/test_names.py::test_a_message_is_sent_again_while_the_server_waits_for_an_earlier_client",
        ),
        (
            "clients that were there all the time are asked, too",
            "if item.changed and roster[item.name].node_id in steady and self._waits(item, now):",
            "if roster[item.name].node_id in steady and self._waits(item, now):",
            "tests/test_names.py::test_answers_of_nodes_that_were_there_all_the_time_stay_with_flower",
        ),
        (
            "a message is sent again when its round is over",
            "        if left <= LEEWAY:",
            "        if left <= 0:",
            "tests/test_names.py::test_nothing_is_sent_again_after_the_round",
        ),
        (
            "an answer from before a node was lost is not looked for",
            "                item.answer = self._arrived(item, now)",
            "                item.answer = None",
            "tests/test_names.py::test_a_node_that_answered_before_it_was_lost_is_not_sent_its_message_again",
        ),
    ),
    *_of(
        "delivery",
        "server_app/federation.py",
        (
            "key new-owners is ignored",
            "free = split_names(self.config.new_owners)",
            'free = split_names("")',
            f"{NAMES}::test_new_owners_of_a_resumed_run",
        ),
        (
            "key min-clients is ignored",
            "wanted = max(self.config.min_clients, ",
            "wanted = max(1, ",
            f"{KEYS}::test_a_start_waits_for_min_clients",
        ),
        (
            "a start waits for a minute whatever round-timeout says",
            "deadline = begun + self.config.round_timeout\n",
            "deadline = begun + 60.0\n",
            f"{KEYS}::test_a_start_waits_no_longer_than_round_timeout",
        ),
        (
            "who goes away is not told",
            "            if name not in self._away:\n",
            "            if False:\n",
            "tests/test_names.py::test_who_goes_away_is_told_once_each_time",
        ),
    ),
    *_of(
        "delivery",
        "client_app/node/transport.py",
        (
            "a SuperNode goes by the parent that it finds when it has imported Flower",
            "args=(int(os.environ[PARENT]),), daemon=True",
            "args=(os.getppid(),), daemon=True",
            "tests/test_kills.py::test_a_node_killed_before_its_supernode_has_imported_anything",
        ),
        (
            "a SuperNode that hangs is waited for",
            "PullPendingTasksRequest(), timeout=HANGS)",
            "PullPendingTasksRequest())",
            "tests/test_nodes.py::test_a_supernode_that_hangs_is_gone",
        ),
    ),
    *_of(
        "delivery",
        "client_app/node/preflight.py",
        (
            "whoever hangs up has TLS",
            "if options.insecure and _has_tls(options):",
            "if options.insecure:",
            "tests/test_nodes.py::test_a_proxy_whose_superlink_is_not_up_yet",
        ),
    ),
    *_of(
        "delivery",
        "client_app/node/supervisor.py",
        (
            "a node waits a pause longer than it is told",
            "                    if left <= 0:",
            "                    if left <= -pause:",
            "tests/test_nodes.py::test_a_node_waits_as_long_as_it_is_told_however_long_an_attempt_takes",
        ),
    ),
    *_of(
        "relay",
        "strategies/core/post_office.py",
        (
            "what is sent in a round is given out in it",
            "        self._new[client] = Mail(server_round, dict(arrays))\n",
            "        self._kept[client] = Mail(server_round, dict(arrays))\n",
            f"{FORMULAS}::test_mail_is_given_out_from_the_next_round_on",
        ),
    ),
    *_of(
        "methods",
        "client_app/methods/ditto.py",
        (
            "Ditto: the personal model is held near the shared one as it was trained",
            "        self.load_tensors(personal)\n",
            "        self.load_tensors(personal)\n        self.received = self._shared\n",
            f"{TWO}::test_a_step_of_ditto_by_hand",
        ),
        (
            "Ditto: the shared model is held near the received one, too",
            "self.model.parameters(), super().loss)",
            "self.model.parameters())",
            f"{TWO}::test_what_ditto_shares_is_fedavg",
        ),
        (
            "Ditto: the personal model begins at the received one",
            "        self.load_tensors(personal)\n",
            "        self.load_tensors(self.received)\n",
            f"{TWO}::test_ditto_without_lambda_is_local_beside_fedavg",
        ),
    ),
    *_of(
        "methods",
        "client_app/methods/apfl.py",
        (
            "APFL: the private model's step lacks the factor of the chain rule",
            "v.grad = self._alpha * gradient",
            "v.grad = gradient",
            f"{TWO}::test_a_step_of_apfl_by_hand",
        ),
        (
            "APFL: what was learned of alpha is forgotten",
            "        self.memory[ALPHA] = self._alpha\n",
            "",
            f"{TWO}::test_a_step_of_apfl_by_hand",
        ),
        (
            "APFL: the client uses the shared model",
            "        self.load_tensors(model.state_dict())\n",
            "",
            f"{TWO}::test_apfl_with_alpha_1_is_local",
        ),
    ),
    *_of(
        "methods",
        "client_app/methods/pfedme.py",
        (
            "pFedMe: theta is its own anchor, as an alias",
            "parameter.detach().clone() for name",
            "parameter.detach() for name",
            f"{TWO}::test_a_batch_of_pfedme_by_hand",
        ),
        (
            "pFedMe: theta is sent",
            "tensors = self.copy_tensors() | self._local",
            "tensors = self.copy_tensors()",
            f"{TWO}::test_a_batch_of_pfedme_by_hand",
        ),
        (
            "pFedMe: what follows is used and kept",
            "        return self.run_steps(self.config.local_epochs, step)\n",
            "        loss = self.run_steps(self.config.local_epochs, step)\n"
            "        self.load_tensors(self._local)\n        return loss\n",
            f"{TWO}::test_pfedme_uses_and_keeps_theta_and_sends_what_follows_it",
        ),
    ),
    *_of(
        "methods",
        "strategies/pfedme.py",
        (
            "key pfedme.beta is ignored",
            "(1 - beta) * self.arrays[n] + beta * mean[n]",
            "mean[n]",
            f"{TWO}::test_the_server_of_pfedme_goes_part_of_the_way",
        ),
        (
            "pFedMe: clients count by their samples",
            "    weighted = False\n",
            "",
            f"{TWO}::test_the_server_of_pfedme_goes_part_of_the_way",
        ),
        (
            "pFedMe: running statistics move by beta",
            "weights = {name for name, _ in self.model.named_parameters()}",
            "weights = set(mean)",
            "tests/test_ditto_apfl_pfedme.py::test_running_statistics_do_not_go_part_of_the_way",
        ),
    ),
    *_of(
        "methods",
        "client_app/methods/fedbabu.py",
        (
            "FedBABU sends what it fine-tuned",
            "return self._shared",
            "return super().upload()",
            f"{STARTS}::test_fedbabu_shares_the_extractor_of_fedper_with_a_frozen_head",
        ),
        (
            "FedBABU fine-tunes what it trained, not what it received",
            "        self.load_tensors(start)\n",
            "",
            f"{STARTS}::test_fedbabu_fine_tunes_what_it_received_and_keeps_it",
        ),
        (
            "FedBABU trains under the head that was fine-tuned",
            '        self.load_tensors({f"head.{name}": tensor for name, tensor in common.items()})\n',
            "",
            f"{STARTS}::test_fedbabu_shares_the_extractor_of_fedper_with_a_frozen_head",
        ),
    ),
    *_of(
        "methods",
        "client_app/methods/lg_fedavg.py",
        (
            "LG-FedAvg: the extractor leaves after the FedAvg rounds",
            'fedavg: bool = self.message["round"] <= self.parameters.fedavg_rounds',
            "fedavg = bool(self.parameters.fedavg_rounds)",
            f"{STARTS}::test_lg_fedavg_sends_every_client_the_last_shared_extractor_once",
        ),
        (
            "LG-FedAvg: a client gives up an extractor that it trained alone",
            "and self._has_own():",
            "and False:",
            f"{STARTS}::test_an_extractor_that_was_trained_alone_is_not_given_up",
        ),
        (
            "LG-FedAvg: an extractor of an earlier run leaves in a FedAvg round",
            "return self.shared_names() if self._is_fedavg() else super().starts_from()",
            "return super().starts_from()",
            f"{POLICY}::test_lg_fedavg_sends_no_extractor_that_was_trained_alone",
        ),
        (
            "LG-FedAvg: a lost extractor is the initial one",
            "elif private and self.parameters.fedavg_rounds and",
            "elif False and",
            "tests/test_fedbabu_lg_fedavg_per_fedavg_fedala.py::test_lg_fedavg_gives_a_client_that_lost_its_state_an_extractor_again",
        ),
    ),
    *_of(
        "methods",
        "strategies/lg_fedavg.py",
        (
            "LG-FedAvg: who misses the round after the FedAvg rounds never gets their extractor",
            "        if client.name not in self._private:\n",
            "        if server_round <= self.parameters.fedavg_rounds + 1:\n",
            f"{STARTS}::test_lg_fedavg_sends_every_client_the_last_shared_extractor_once",
        ),
        (
            "LG-FedAvg: a resumed run sends extractors again",
            "self._own = set(without_prefix(arrays, OWN))",
            "pass",
            f"{STARTS}::test_lg_fedavg_resumed_knows_who_has_an_extractor",
        ),
        (
            "LG-FedAvg: an extractor that is private is averaged all the same",
            "if (name in arrays) != fedavg:",
            "if (name in arrays) < fedavg:",
            f"{STARTS}::test_lg_fedavg_refuses_what_is_not_shared_in_a_round",
        ),
        (
            "LG-FedAvg: a refused client is still known to have an extractor",
            "        self._own -= self._private\n",
            "",
            "tests/test_fedbabu_lg_fedavg_per_fedavg_fedala.py::test_lg_fedavg_gives_a_client_that_lost_its_state_an_extractor_again",
        ),
    ),
    *_of(
        "methods",
        "client_app/methods/per_fedavg.py",
        (
            "Per-FedAvg: running statistics of the client's own never move",
            "self.load_tensors({name: received[name] for name in self.shared_names()})",
            "self.load_tensors(received)",
            f"{STARTS}::test_batch_normalisation",
        ),
        (
            "Per-FedAvg sends the adapted model",
            "return self._shared",
            "return super().upload()",
            f"{STARTS}::test_per_fedavg_is_that_of_a_plain_loop",
        ),
        (
            "Per-FedAvg: the outer gradient is taken before the inner step",
            "            moved(weights, start, gradient, -own.inner_lr)\n",
            "",
            f"{STARTS}::test_per_fedavg_is_that_of_a_plain_loop",
        ),
        (
            "Per-FedAvg: the difference of gradients is divided by delta",
            "/ (2 * delta) for a, b",
            "/ delta for a, b",
            f"{STARTS}::test_hessian_product_by_hand_and_by_autograd",
        ),
        (
            "Per-FedAvg: the Hessian is taken where the inner step ended",
            "weights, start, gradient, own.delta, lambda:",
            "weights, [w.detach().clone() for w in weights], gradient, own.delta, lambda:",
            f"{STARTS}::test_per_fedavg_is_that_of_a_plain_loop",
        ),
    ),
    *_of(
        "methods",
        "client_app/methods/fedala.py",
        (
            "FedALA forgets its mixing weights",
            "known.get(WEIGHT + name, torch.ones_like(p))",
            "torch.ones_like(p)",
            f"{STARTS}::test_ala_is_that_of_a_plain_loop",
        ),
        (
            "FedALA: mixing weights are not clipped",
            ".clamp(0, 1)",
            "",
            f"{STARTS}::test_ala_by_hand",
        ),
        (
            "FedALA mixes the global model into an untrained one",
            "if self.setting.state.round:",
            "if self.message:",
            f"{STARTS}::test_fedala_takes_the_global_model_the_first_time_and_keeps_its_weights_to_itself",
        ),
        (
            "FedALA takes its samples from the order of the training",
            'generator=self.generator("local aggregation")',
            "generator=self.order",
            f"{STARTS}::test_fedala_with_weights_that_stay_at_1_is_fedavg",
        ),
    ),
    *_of(
        "methods",
        "strategies/core/simplex.py",
        (
            "a combination is not quite the smallest",
            "_TOLERANCE = 1e-12",
            "_TOLERANCE = 1e-3",
            f"{HEADS}::test_a_combination_meets_the_conditions_for_a_minimum",
        ),
    ),
    *_of(
        "methods",
        "strategies/fedpac.py",
        (
            "FedPAC: the variance is not divided by the samples",
            "return max(energy - squares, 0.0) / samples",
            "return max(energy - squares, 0.0)",
            f"{HEADS}::test_variance_of_a_head_by_hand",
        ),
        (
            "FedPAC: everybody gets the first client's combination",
            "products - row - row[:, None] + row[i]",
            "products - products[0] - products[0][:, None] + products[0, 0]",
            f"{HEADS}::test_combination_weights_by_hand",
        ),
        (
            "FedPAC: prototypes are averaged by all samples",
            "self._aggregate.add({name: prototype}, shares[name] * samples)",
            "self._aggregate.add({name: prototype}, samples)",
            f"{HEADS}::test_prototypes_are_averaged_by_the_samples_of_their_class",
        ),
        (
            "FedPAC: a combined head is forgotten at a resume",
            "self._combined.setdefault(client, {})[tensor] = array",
            "pass",
            f"{HEADS}::test_combined_heads_survive_a_resume",
        ),
    ),
    *_of(
        "methods",
        "client_app/methods/fedpac.py",
        (
            "FedPAC: the statistics are those after training",
            "sent = super().upload() | self._statistics",
            "means = {name.replace(PREFIX, MEAN): mean for name, mean in self.local_prototypes().items()}\n        "
            "sent = super().upload() | self._statistics | means",
            f"{HEADS}::test_statistics_are_of_the_received_extractor",
        ),
        (
            "FedPAC: the head's rate does not decay",
            'self.config.decayed(own.head_lr, self.message["round"])',
            "own.head_lr",
            f"{HEADS}::test_fedpac_with_both_switches_off_is_fedrep",
        ),
    ),
    *_of(
        "methods",
        "strategies/fedgh.py",
        (
            "FedGH: prototypes come in the same order every time",
            "(self._prototypes[place] for place in order)",
            "self._prototypes",
            f"{HEADS}::test_prototypes_come_in_another_order_every_time",
        ),
        (
            "FedGH: the server trains the model that others begin with",
            "head = copy.deepcopy(self.model.head)",
            "head = self.model.head",
            f"{HEADS}::test_the_server_trains_a_head_of_its_own",
        ),
        (
            "FedGH: the server's head is the initial one in every round",
            'self.arrays[f"head.{n}"].copy()',
            'self.initial_arrays()[f"head.{n}"].copy()',
            f"{HEADS}::test_the_head_goes_on_from_round_to_round",
        ),
        (
            "FedGH: gradients are not clipped",
            "        nn.utils.clip_grad_norm_(parameters, CLIP)\n",
            "",
            f"{HEADS}::test_no_prototype_moves_the_head_far",
        ),
    ),
    *_of(
        "methods",
        "client_app/methods/gpfl.py",
        (
            "GPFL: the global route has the personal context",
            "valve(features, self._global)",
            "valve(features, self.memory[CONTEXT])",
            f"{HEADS}::test_the_loss_of_gpfl",
        ),
        (
            "GPFL: the magnitude moves with the embeddings",
            "self._frozen[batch.y]",
            "self._embeddings()[batch.y]",
            f"{HEADS}::test_the_loss_of_gpfl",
        ),
        (
            "GPFL serves without its valve",
            "        if not self.parameters.valve:\n            return super().serving()",
            "        if self.parameters.valve:\n            return super().serving()",
            f"{HEADS}::test_gpfl_predicts_by_the_personal_route",
        ),
        (
            "GPFL: momentum multiplies what mu takes from the valve",
            "momentum=0.0, weight_decay",
            "weight_decay",
            f"{HEADS}::test_valve_and_embeddings_have_mu_as_weight_decay_and_no_momentum",
        ),
        (
            "GPFL: the file of a personal model lacks the valve",
            'serves_with = (f"{VALVE}.", CONTEXT)',
            "serves_with = ()",
            "tests/test_fedpac_fedgh_gpfl.py::test_the_file_of_a_personal_model_has_all_that_predicts",
        ),
    ),
    *_of(
        "graphs",
        "strategies/core/graph.py",
        (
            "weights by the client's own degree alone",
            "1 / (1 + max(own, len(graph[peer])))",
            "1 / (1 + own)",
            f"{GRAPHS}::test_weights_by_hand",
        ),
        (
            "a random graph may fall apart",
            "if degree < 2 or _connected(edges, n):",
            "if True:",
            f"{GRAPHS}::test_a_random_graph_is_connected",
        ),
        (
            "an exchange may double an edge",
            " and not new & there:",
            ":",
            f"{GRAPHS}::test_weights_are_symmetric_and_doubly_stochastic",
        ),
        (
            "the lattice is permuted only",
            "_EXCHANGES = 20",
            "_EXCHANGES = 0",
            f"{GRAPHS}::test_a_random_graph_is_not_the_lattice_in_another_order",
        ),
    ),
    *_of(
        "graphs",
        "strategies/core/decentralised.py",
        (
            "a neighbour that has not published is forwarded",
            " if peer in self.post) for client",
            ") for client",
            f"{GRAPHS}::test_weights_of_neighbours_that_have_not_published_go_to_the_client",
        ),
    ),
    *_of(
        "graphs",
        "client_app/methods/dfedavgm.py",
        (
            "key dfedavgm.momentum is ignored",
            "self.loss, momentum=self.parameters.momentum)",
            "self.loss)",
            f"{GRAPHS}::test_the_momentum_is_the_methods_own",
        ),
        (
            "DFedAvgM takes the plain mean",
            'weights = self.peers(self.shared_names()), self.message.get("weights", [])',
            "weights = self.peers(self.shared_names()), [1 / (1 + len(self.peers()))] * len(self.peers())",
            f"{GRAPHS}::test_a_client_takes_the_weighted_mean_over_its_neighbours",
        ),
    ),
    *_of(
        "graphs",
        "client_app/methods/dispfl.py",
        (
            "DisPFL divides by all neighbours",
            "        count += mask\n",
            "        count += 1\n",
            f"{GRAPHS}::test_masked_mean_by_hand",
        ),
        (
            "DisPFL: the new mask is put on before it is averaged",
            "            masks = [self.memory[MASK + name], *(",
            "            masks = [self.memory[NEXT + name], *(",
            f"{GRAPHS}::test_sparse_tensors_are_averaged_over_those_who_have_them",
        ),
        (
            "DisPFL trains what is outside the mask",
            "after_step=put_on)",
            "after_step=None)",
            f"{GRAPHS}::test_a_personal_model_is_zero_outside_its_mask_which_moves_at_the_next_aggregation",
        ),
        (
            "DisPFL drops the largest weights",
            "math.inf).argsort(stable=True)[:count]",
            "math.inf).argsort(stable=True)[-count:]",
            f"{GRAPHS}::test_a_mask_is_moved_from_small_weights_to_large_scores",
        ),
        (
            "key dispfl.own-masks is ignored",
            "[self.setting.name] if self.parameters.own_masks else []",
            "[self.setting.name]",
            f"{GRAPHS}::test_first_masks_are_each_clients_own_or_the_same",
        ),
    ),
    *_of(
        "graphs",
        "strategies/dispfl.py",
        (
            "a mask of any size is taken",
            "            if have != count:",
            "            if False:",
            f"{GRAPHS}::test_a_mask_of_another_size_is_refused",
        ),
        (
            "ERK does not share out what whole tensors leave",
            " - sum(sizes[name] for name in whole)\n",
            "\n",
            f"{GRAPHS}::test_kept_elements_by_hand",
        ),
    ),
    *_of(
        "graphs",
        "results/history.py",
        (
            "peers are not read back",
            'peers=_names(record.get("peers")),',
            "peers=(),",
            f"{GRAPHS}::test_peers_are_written_and_read",
        ),
    ),
    *_of(
        "graphs",
        "results/report_charts.py",
        (
            "an edge is drawn alike however often it was used",
            "counts[pair] = counts.get(pair, 0) + 1",
            "counts[pair] = 1",
            f"{GRAPHS}::test_an_edge_is_as_opaque_as_it_was_used_often",
        ),
    ),
    *_of(
        "methods",
        "strategies/fedkd.py",
        (
            "FedKD: a student of the model's kind has a start of its own",
            ", as_model=same)",
            ")",
            f"{COLLABORATORS}::test_a_student_of_the_models_kind_begins_as_the_model",
        ),
        (
            "FedKD keeps no singular value where it needs all",
            "    return min(int((sums <= energy * sums[-1]).sum()) + 1, len(sums)) if sums[-1] > 0 else 1",
            "    return int((sums <= energy * sums[-1]).sum()) + 1 if sums[-1] > 0 else 0",
            f"{COLLABORATORS}::test_ranks_by_hand",
        ),
        (
            "FedKD: who was refused counts as having what it had before",
            "has = {client.name: self._has.pop(client.name, NOTHING)",
            "has = {client.name: self._has.get(client.name, NOTHING)",
            f"{COLLABORATORS}::test_a_client_whose_reply_was_lost_is_sent_the_whole_student "
            f"{COLLABORATORS}::test_who_has_the_student_is_sent_nothing",
        ),
        (
            "FedKD: a product that cannot travel is averaged",
            "        check_sendable(student, self.shared_networks(self.setup), self.config.wire)\n",
            "",
            "tests/test_fedkd_fedcac_apple.py::test_factors_whose_product_cannot_travel_are_refused_by_the_server",
        ),
    ),
    *_of(
        "methods",
        "client_app/methods/fedkd.py",
        (
            "FedKD keeps the student that it trained",
            "        self.load_tensors(self._before)\n",
            "",
            f"{COLLABORATORS}::test_the_global_student_is_that_of_the_server_at_each_client",
        ),
        (
            "FedKD: the weight of its losses has a gradient",
            "(teacher + student).detach()",
            "(teacher + student)",
            f"{COLLABORATORS}::test_divergence_and_intensity_by_hand",
        ),
    ),
    *_of(
        "methods",
        "strategies/fedcac.py",
        (
            "FedCAC: masks of any size are taken",
            "            if count != due:",
            "            if count < 0:",
            f"{COLLABORATORS}::test_a_mask_of_everything_or_nothing_is_refused_and_leaves_nothing_behind",
        ),
        (
            "FedCAC: collaborators for ever",
            "if progress > 1 or not pairs.size:",
            "if not pairs.size:",
            f"{COLLABORATORS}::test_collaborators_by_hand",
        ),
        (
            "FedCAC leaves a client out of its own mean",
            "for name in (client.name, *self._near[client.name]):",
            "for name in self._near[client.name] or [client.name]:",
            f"{COLLABORATORS}::test_each_client_is_sent_its_critical_elements_from_those_like_it",
        ),
    ),
    *_of(
        "methods",
        "client_app/methods/apple.py",
        (
            "APPLE: the core model has the gradient of the mixture",
            "core.grad = relationships[own] * gradient",
            "core.grad = gradient.clone()",
            f"{COLLABORATORS}::test_a_step_on_core_model_and_relationships_is_that_of_the_gradient",
        ),
        (
            "APPLE: the proximal term has half its gradient",
            "+ 2 * weight * apart",
            "+ weight * apart",
            f"{COLLABORATORS}::test_a_step_on_core_model_and_relationships_is_that_of_the_gradient",
        ),
        (
            "APPLE forgets what it downloaded",
            "        if self.parameters.downloads:\n",
            "        if False:\n",
            f"{COLLABORATORS}::test_a_client_downloads_no_more_than_it_may_and_first_what_is_new",
        ),
        (
            "APPLE: downloads are counted in rounds of others, too",
            "float(self.memory[DOWNLOADED]) / len(others)",
            '(self.message["round"] - 1) * most / len(others)',
            "tests/test_fedkd_fedcac_apple.py::test_downloads_count_for_their_probabilities_where_they_were_made",
        ),
        (
            "APPLE: the rate of relationships does not decay",
            'rate = self.config.decayed(self.parameters.relationship_lr, self.message["round"])',
            "rate = self.parameters.relationship_lr",
            "tests/test_fedkd_fedcac_apple.py::test_a_step_on_core_model_and_relationships_is_that_of_the_gradient",
        ),
        (
            "APPLE: relationships decay as weights",
            "self.optimizer([relationships], lr=rate, weight_decay=0.0)",
            "self.optimizer([relationships], lr=rate)",
            "tests/test_fedkd_fedcac_apple.py::test_a_step_on_core_model_and_relationships_is_that_of_the_gradient",
        ),
    ),
    *_of(
        "criticalfl",
        "strategies/criticalfl.py",
        (
            "one client's gradient norm decides alone",
            "    most = MOST_TIMES * median(norms)\n",
            "    most = math.inf\n",
            f"{CRITICAL}::test_one_norm_counts_for_twice_the_median_at_most",
        ),
        (
            "a weight that nobody sent becomes 0",
            "{name: array.copy() for name, array in before.items()}",
            "{name: np.zeros_like(array) for name, array in before.items()}",
            f"{CRITICAL}::test_a_sparse_mean_by_hand",
        ),
        (
            "clients are doubled again after there were as many as may be",
            "if self.critical and not self.reached:",
            "if self.critical:",
            f"{CRITICAL}::test_critical_periods_by_hand",
        ),
        (
            "a resumed run forgets the last norm",
            '(self._norm,) = arrays["norm"].tolist()',
            "pass",
            f"{CRITICAL}::test_a_resumed_run_goes_on_in_its_period",
        ),
        (
            "what did not travel counts as a change to 0",
            "return {**arrays, **filled}",
            "return arrays",
            f"{CRITICAL}::test_what_is_left_out_is_no_change",
        ),
        (
            "a norm counts whatever the steps",
            "steps = math.ceil(samples / self.config.batch_size)",
            "steps = 1",
            "tests/test_criticalfl_fedpa.py::test_a_norm_counts_by_the_steps_of_its_client",
        ),
    ),
    *_of(
        "methods",
        "strategies/apfl.py",
        (
            "APFL: clients count by their samples",
            "    weighted = False\n",
            "",
            f"{TWO}::test_what_apfl_shares_is_fedavg_with_equal_weights",
        ),
    ),
    *_of(
        "methods",
        "client_app/methods/dispfl.py",
        (
            "DisPFL: scores are of training mode",
            "        self.model.eval()\n        batch = next",
            "        batch = next",
            "tests/test_dfedavgm_dispfl.py::test_what_grows_is_where_the_gradient_is_largest",
        ),
    ),
    *_of(
        "methods",
        "strategies/core/method.py",
        (
            "a typo in what a method shares shares the whole model",
            '            if wrong:\n                raise FloretError(f"{where}: {name}',
            '            if False:\n                raise FloretError(f"{where}: {name}',
            "tests/test_methods.py::test_a_typo_in_what_a_method_says_of_itself_is_refused",
        ),
    ),
    *_of(
        "methods",
        "engine/checks.py",
        (
            "a client half that is missing is found by the clients",
            '    load_class("client_app.methods", config.method, FloretClient)\n',
            "",
            "tests/test_setup.py::test_a_client_half_that_no_client_could_use_is_told_before_the_start",
        ),
    ),
    *_of(
        "methods",
        "strategies/__init__.py",
        (
            "a method's file with a syntax error ends every command",
            "            except (SyntaxError, ValueError) as error:",
            "            except ValueError as error:",
            "tests/test_listing.py::test_a_method_whose_file_cannot_be_read_is_listed_and_says_why",
        ),
    ),
    *_of(
        "fedpa",
        "client_app/methods/fedpa.py",
        (
            "FedPA: a batch of one sample is added to the one before",
            "        return (self.model,)\n",
            "        return super().on_batches()\n",
            f"{CRITICAL}::test_batches_of_fedpa_are_those_of_fedavg_also_with_one_sample",
        ),
    ),
    *_of(
        "replies",
        "strategies/core/base.py",
        (
            "weights that a relay passes on are divided by the steps",
            "if group in self._moved else size",
            "if group in self._trained else size",
            f"{AGGREGATION}::test_honest_clients_of_a_relay_are_judged_by_their_weights_not_by_their_steps",
        ),
    ),
    *_of(
        "fedpa",
        "strategies/fedpa.py",
        (
            "the generator seeks the prototypes",
            "loss = loss - own.adversarial_weight",
            "loss = loss + own.adversarial_weight",
            f"{CRITICAL}::test_features_keep_away_from_the_prototypes_as_the_key_says",
        ),
        (
            "prototypes do not count by the samples of the class",
            "self.weight(samples) * int(counts[label]) / int(counts.sum())",
            "self.weight(samples)",
            f"{CRITICAL}::test_prototypes_are_means_by_samples_of_the_class",
        ),
        (
            "a resumed run forgets the generator's moments",
            "        self._moments = arrays\n",
            "        pass\n",
            f"{CRITICAL}::test_moments_of_the_generator_survive",
        ),
    ),
    *_of(
        "privacy",
        "client_app/client.py",
        (
            "the head without noise is trained on",
            "self.load_tensors({name: self._kept.get(FEEDS + name, first[name]).to(self.device) for name in names})",
            "pass",
            f"{PRIVATE}::test_what_leaves_does_not_depend_on_the_head_that_is_trained_without_noise",
        ),
        (
            "a protected client tells what it measured",
            "samples, measured = 1, {}",
            "samples = 1",
            f"{PRIVATE}::test_what_a_protected_client_measures_stays_with_it",
        ),
        (
            "a protected client tells how many samples it has",
            "samples, measured = 1, {}",
            "measured = {}",
            f"{PRIVATE}::test_what_a_protected_client_measures_stays_with_it",
        ),
        (
            "every message has the same noise",
            "Noise.secret())",
            "Noise.of(config.seed, setting.name, self.message['round']))",
            f"{PRIVATE}::test_a_message_that_comes_twice_has_other_noise",
        ),
        (
            "tensors that did not come are the client's own",
            "set(self.starts_from()) - self.received.keys()",
            "set()",
            f"{POLICY}::test_the_personal_model_does_not_leave_in_the_place_of_what_was_not_sent",
        ),
        (
            "the personal head is trained with noise",
            "self.run_epochs(epochs, self.model.head.parameters(), head_loss, leaves=False)",
            "self.run_epochs(epochs, self.model.head.parameters(), head_loss)",
            f"{PRIVATE}::test_a_personal_head_is_trained_without_noise_beside_the_other",
        ),
    ),
    *_of(
        "privacy",
        "client_app/training.py",
        (
            "the penalty is left out where examples are protected",
            "        penalty = self.penalty()\n",
            "        penalty = None\n",
            f"{PRIVATE}::test_a_step_on_protected_examples_by_hand",
        ),
        (
            "PFAKD's teacher is asked about all of the protected data at once",
            "and not (leaves and self.trains_examples)",
            "",
            "tests/test_privacy.py::test_where_examples_are_protected_a_teacher_is_asked_about_the_batch",
        ),
    ),
    *_of(
        "privacy",
        "client_app/clipping.py",
        (
            "Opacus unfolds images that lie channels last",
            "[inputs.contiguous()], slopes.contiguous())",
            "[inputs], slopes)",
            f"{PRIVATE}::test_the_sum_of_clipped_gradients_is_that_of_autograd",
        ),
        (
            "gradients of examples are not clipped",
            ".clamp(max=1.0)",
            ".clamp(min=1.0)",
            f"{PRIVATE}::test_the_sum_of_clipped_gradients_is_that_of_autograd",
        ),
        (
            "the norm of an example has no biases",
            "return bias is not None and bias.requires_grad",
            "return False",
            f"{PRIVATE}::test_the_sum_of_clipped_gradients_is_that_of_autograd",
        ),
        (
            "a product of places is of one place",
            "(of_patches * products).sum((1, 2))",
            "_roots(of_patches * products).square().sum(1)",
            f"{PRIVATE}::test_the_sum_of_clipped_gradients_is_that_of_autograd",
        ),
        (
            "squares of gradients are of float32",
            "return rows.double().square().sum(1)",
            "return rows.square().sum(1).double()",
            f"{PRIVATE}::test_a_norm_is_right_where_squares_are_not",
        ),
        (
            "rounding over places is no part of a norm",
            "return found.clamp(min=0) + (rounding * summed).square()",
            "return found.clamp(min=0)",
            f"{PRIVATE}::test_what_cancels_over_places_is_bounded_with_its_rounding",
        ),
        (
            "what is too large for float32 is clipped",
            "fine = (norms <= _MOST) & (inputs <= _MOST)",
            "fine = torch.isfinite(norms)",
            f"{PRIVATE}::test_what_is_too_large_to_be_clipped_counts_as_zero",
        ),
        (
            "a layer that is used twice counts once",
            "if layer in self._seen:",
            "if False:",
            f"{PRIVATE}::test_a_layer_that_is_used_twice_has_no_gradients_of_examples",
        ),
        (
            "an example without a finite gradient spoils the sum",
            "if fine.all():",
            "if True:",
            f"{PRIVATE}::test_an_example_without_a_finite_gradient_counts_as_zero",
        ),
    ),
    *_of(
        "privacy",
        "client_app/protection.py",
        (
            "a run may have next to no noise",
            "if noise < self.noise:",
            "if False:",
            f"{PRIVATE}::test_a_run_with_next_to_no_noise_is_refused",
        ),
        (
            "a batch is always of the same size",
            "[np.flatnonzero(draws.random(samples) < 1 / self._plan.steps) for _ in range(self._plan.steps)]",
            "np.array_split(draws.permutation(samples), self._plan.steps)",
            f"{PRIVATE}::test_examples_are_drawn_each_with_the_same_probability",
        ),
        (
            "noise is that of a bound of 1",
            "self._plan.noise * self.keys.clip))",
            "self._plan.noise))",
            f"{PRIVATE}::test_a_step_on_protected_examples_by_hand",
        ),
        (
            "more passes than were paid for",
            "if self._steps > self._passes * self._plan.steps:",
            "if False:",
            f"{PRIVATE}::test_examples_are_drawn_each_with_the_same_probability",
        ),
        (
            "the number of examples is not noised",
            "count = samples + float(self.noise.once((), COUNT.noise))",
            "count = float(samples)",
            f"{PRIVATE}::test_the_number_of_examples_is_noised_once_a_run_and_paid_for",
        ),
        (
            "the number of examples is free",
            "self._account.pay([COUNT], count=count)",
            "self._account.pay([], count=count)",
            f"{PRIVATE}::test_the_number_of_examples_is_noised_once_a_run_and_paid_for",
        ),
        (
            "every refused round tells another number of examples",
            "count = self._account.count()",
            "count = None",
            f"{PRIVATE}::test_a_refusal_tells_no_number_of_examples_that_is_not_paid_for",
        ),
        (
            "an update leaves without noise",
            "        if not self.keys.by_server:\n            deviation",
            "        if self.keys.by_server:\n            deviation",
            f"{PRIVATE}::test_a_whole_update_is_clipped_and_noised",
        ),
        (
            "a node's budget is that of a run",
            "epsilon = self._spent(ledger.lines, releases)",
            "epsilon = self._spent([line for line in ledger.lines if line.run == self._line.run], releases)",
            f"{PRIVATE}::test_a_node_stops_at_its_own_budget_whatever_the_server_says",
        ),
        (
            "a resumed server makes rounds again for nothing",
            "for attempt, start in enumerate((0, *self._resumed)):",
            "for attempt, start in enumerate((0,)):",
            f"{PRIVATE}::test_a_run_with_noise_by_the_server_is_paid_in_advance",
        ),
        (
            "runs that protected the client are free for its examples",
            "return spent(lines, self._budget.delta, releases)",
            "return spent([line for line in lines if line.unit == self._line.unit], self._budget.delta, releases)",
            "tests/test_privacy.py::test_examples_of_a_client_that_was_protected_as_a_whole_have_spent_more",
        ),
        (
            "a single step has the noise of one among many",
            "self.noise.once if self._plan.steps == 1 else self.noise.normal",
            "self.noise.normal",
            "tests/test_privacy.py::test_a_single_step_has_the_noise_of_what_is_released_at_once",
        ),
    ),
    *_of(
        "privacy",
        "strategies/core/protection.py",
        (
            "the sum is divided by those who came",
            "noised / self._expected)",
            "noised / max(2 * self.balance, 1))",
            f"{PRIVATE}::test_the_noised_mean_by_hand",
        ),
        (
            "nobody can predict a simulation's draws",
            "if self._simulated else Noise.secret()",
            "if False else Noise.secret()",
            f"{PRIVATE}::test_each_client_is_drawn_with_the_probability_that_is_accounted_for",
        ),
        (
            "the share below the bound is free",
            "noise = (noise**-2 - (2 * self._share_noise(expected)) ** -2) ** -0.5",
            "pass",
            f"{PRIVATE}::test_the_bound_follows_the_quantile",
        ),
        (
            "who sends back what it received moves the share by a whole client",
            "self.balance += 0.0 if norm == 0 else 0.5 if norm",
            "self.balance += 0.5 if norm",
            "tests/test_privacy.py::test_the_noised_mean_by_hand",
        ),
    ),
    *_of(
        "privacy",
        "strategies/core/base.py",
        (
            "samples weigh where clients are protected",
            "return float(samples) if self.weighted and not self.protection else 1.0",
            "return float(samples) if self.weighted else 1.0",
            f"{PRIVATE}::test_all_clients_weigh_the_same_where_something_is_protected",
        ),
        (
            "a round in which nobody was drawn says so",
            "if not by_server and len(self.results) < self.config.min_replies:",
            "if len(self.results) < self.config.min_replies:",
            f"{PRIVATE}::test_in_a_round_in_which_nobody_is_drawn_noise_is_released",
        ),
        (
            "what half precision rounds off counts as an update",
            "self._aggregate = self.protection.mean(before, len",
            "self._aggregate = self.protection.mean(self.arrays, len",
            "tests/test_privacy.py::test_an_update_is_to_what_clients_received",
        ),
    ),
    *_of(
        "privacy",
        "common/privacy/ledger.py",
        (
            "a ledger that was cut short is taken",
            "not len(found) - 1 <= count <= len(found)",
            "not len(found) - 1 <= count",
            f"{PRIVATE}::test_a_ledger_that_was_changed_is_found_out",
        ),
        (
            "a line that was changed is taken",
            "right = said.pop(_BEFORE) == before",
            "right = bool(said.pop(_BEFORE))",
            f"{PRIVATE}::test_a_ledger_that_was_changed_is_found_out",
        ),
        (
            "what a crash left of a line stays",
            'file.truncate(self._path.read_bytes().rfind(b"\\n") + 1)',
            "pass",
            f"{PRIVATE}::test_what_a_crash_left_of_a_line_is_cut_off_and_a_whole_line_counts",
        ),
        (
            "two processes write a ledger at a time",
            "with self._locked(fcntl.LOCK_EX):",
            "with self._locked(fcntl.LOCK_SH):",
            f"{PRIVATE}::test_two_processes_with_one_ledger_lose_no_line",
        ),
    ),
    *_of(
        "privacy",
        "common/privacy/accounting.py",
        (
            "releases of one kind are counted once",
            "steps[kind] = steps.get(kind, 0) + release.steps",
            "steps[kind] = release.steps",
            f"{PRIVATE}::test_releases_add_up",
        ),
        (
            "noise is calibrated to just above the target",
            "    while above(found) > 0:\n        found += _PRECISION / 2\n",
            "    found -= _PRECISION\n",
            f"{PRIVATE}::test_noise_is_calibrated_to_just_below_the_target",
        ),
        (
            "an example of a protected client spends what the client does",
            "apart = [Release(release.noise / 2, 1.0, release.steps) for release in clients]",
            "apart = list(clients)",
            "tests/test_privacy.py::test_an_example_of_a_protected_client_can_turn_its_update_around",
        ),
        (
            "two steps cost what one does",
            "return min(least, first + epsilon_of(clients, rest))",
            "return min(least, first)",
            "tests/test_privacy.py::test_an_example_of_a_protected_client_can_turn_its_update_around",
        ),
    ),
    *_of(
        "privacy",
        "common/privacy/noise.py",
        (
            "noise of four draws is twice as large",
            "* (deviation / 2)",
            "* deviation",
            f"{PRIVATE}::test_noise_by_its_moments_and_its_secret",
        ),
        (
            "each tensor is clipped by itself",
            "return {name: array.astype(np.float64) * factor for name, array in arrays.items()}",
            "return {name: array.astype(np.float64) * min(1.0, bound / max(norm_of({name: array}), 1e-9)) "
            "for name, array in arrays.items()}",
            f"{PRIVATE}::test_clipping_of_a_whole_update_by_hand",
        ),
    ),
    *_of(
        "privacy",
        "server_app/federation.py",
        (
            "numbers of samples that were not told are told",
            "self.told = self._simulated or not config.privacy.on",
            "self.told = True",
            "tests/test_privacy.py::test_numbers_of_samples_that_were_not_told_are_not_made_up",
        ),
    ),
    *_of(
        "privacy",
        "client_app/batches.py",
        (
            "a row's rounding depends on how many others there are",
            "if not 0 < count < FEWEST:",
            "if True:",
            "tests/test_privacy.py::test_a_small_batch_is_computed_as_one_of_sixteen",
        ),
    ),
    *_of(
        "privacy",
        "client_app/methods/pfakd.py",
        (
            "PFAKD subtracts features of another batch from those of protected examples",
            "if own.beta and self.trains_examples:",
            "if False:",
            "tests/test_privacy.py::test_with_one_example_more_the_sum_moves_by_its_bound_whatever_pfakd_beta_is",
        ),
    ),
    *_of(
        "privacy",
        "common/config.py",
        (
            "protected examples are trained on several threads",
            'if self.privacy.unit == "example" and self.threads != 1:',
            "if False:",
            "tests/test_privacy.py::test_what_is_trained_on_protected_examples_has_one_thread",
        ),
    ),
    *_of(
        "privacy",
        "data/clients.py",
        (
            "one image of another form is told of protected data",
            '            if not value:\n                raise ConfigError(\n                    f"{key} = 0: where',
            '            if False:\n                raise ConfigError(\n                    f"{key} = 0: where',
            "tests/test_privacy.py::test_labels_of_images_do_not_follow_from_the_folders_that_there_are",
        ),
    ),
    *_of(
        "privacy",
        "data/images.py",
        (
            "a test part without images of a class is told of protected data",
            "if not files and not silent:",
            "if not files:",
            "tests/test_privacy.py::test_labels_of_images_do_not_follow_from_the_folders_that_there_are",
        ),
    ),
    *_of(
        "privacy",
        "client_app/app.py",
        (
            "a run without privacy leaves nothing beside the ledger",
            "if self.has_own_data and not self.protects:",
            "if False:",
            "tests/test_privacy.py::test_the_command_tells_of_runs_without_privacy_and_of_several_clients",
        ),
    ),
    *_of(
        "evidence",
        "results/evidence.py",
        (
            "a margin is over the weakest rival",
            "nearest = min(found, key=lambda rival: found[rival][0] - found[rival][1])",
            "nearest = max(found, key=lambda rival: found[rival][0] - found[rival][1])",
            EVIDENCE,
        ),
        (
            "the paper's margin is over rivals that were not run, too",
            "for rival in found if (value := reported[rival]",
            "for rival in rivals if (value := reported[rival]",
            EVIDENCE,
        ),
        (
            "the span is that of all rivals' seeds",
            "ours[seed] - numbers[nearest][column][seed] for seed in seeds[nearest]]",
            "ours[s] - numbers[r][column][s] for r in found for s in seeds[r]]",
            EVIDENCE,
        ),
        (
            "runs of fewer rounds are at full size",
            '1: "all samples" if "rounds" in others else "all rounds"',
            '1: "full size"',
            EVIDENCE,
        ),
        (
            "scaled runs with other keys count as full size",
            "return self.results.scale == 1 and not self.variant",
            "return self.results.scale == 1",
            EVIDENCE,
        ),
        (
            "scaled runs are listed beside full ones",
            "if finding.result.results.scale == 1 or not full]",
            "]",
            EVIDENCE,
        ),
        (
            "an undecided column counts as held",
            "held = set(self.verdict.held) - set(undecided)",
            "held = set(self.verdict.held)",
            EVIDENCE,
        ),
        (
            "a claim that not every rival has tested is held",
            "so_far = len(held & self.verdict.unfinished.keys())",
            "so_far = 0",
            EVIDENCE,
        ),
        (
            "other keys are not looked for in the configs",
            "named = variant.replace(",
            "others = {}\n        named = variant.replace(",
            EVIDENCE,
        ),
        (
            "a claim held at one scale and broken at another is held",
            "held = found.count({HELD})",
            "held = sum(HELD in outcomes for outcomes in found)",
            f"{EVIDENCE} tests/test_docs.py",
        ),
        (
            "the picture has the largest run, whatever its keys",
            "key=lambda result: (not result.variant, result.results.scale))",
            "key=lambda result: result.results.scale)",
            EVIDENCE,
        ),
        (
            "a claim that holds everywhere, somewhere against some rivals, is mixed",
            "if self.verdict.so_far and len(held) == measured:",
            "if self.verdict.so_far and len(held) == so_far == measured:",
            "tests/test_evidence.py::test_a_claim_is_held_so_far_until_every_rival_was_run",
        ),
    ),
    *_of(
        "evidence",
        "results/experiment.py",
        (
            "two rows are compared over the seeds of each",
            "(mean(ours[s] for s in seeds), mean(theirs[s] for s in seeds)) if seeds",
            "(mean(ours.values()), mean(theirs.values())) if seeds",
            EXPERIMENTS,
        ),
        ("a tie is a lead", "or lead == claim.by == 0}", "}", EXPERIMENTS),
        (
            "rivals that were not run are none",
            "                if missing:",
            "                if not missing:",
            EXPERIMENTS,
        ),
        (
            "the picture shows the first row that runs the paper's method",
            "running[-1] if running",
            "running[0] if running",
            EXPERIMENTS,
        ),
        ("a claim's least margin is ignored", "if lead < claim.by or", "if lead < 0 or", EXPERIMENTS),
        ("a lead is compared in binary", "round(ours - theirs, 2)", "ours - theirs", EXPERIMENTS),
        (
            "a rival that leads with each seed leaves a claim undecided",
            "    return not any(\n        all(row in above",
            "    return True or any(\n        all(row in above",
            EXPERIMENTS,
        ),
        (
            "runs with another number of clients are the table's",
            "if clients != self._clients(row, column) else {}",
            "if clients != clients else {}",
            "tests/test_evidence.py::test_runs_with_another_number_of_clients_are_not_those_of_the_table",
        ),
    ),
    *_of(
        "evidence",
        "cli/reproduce.py",
        ("what another command wrote meanwhile is lost", "known.read_again()", "pass", EXPERIMENTS),
        ("another command writes between", "with locked(options.results, wait=True):", "if True:", EXPERIMENTS),
    ),
    *_of(
        "evidence",
        "results/measured.py",
        ("a curve is thinned from its start", "rounds[::-1][::step][::-1]", "rounds[::step]", EXPERIMENTS),
        (
            "the best round is that of the window",
            "for spread in spreads if spread.mean is not None), default=None)",
            "for spread in shown if spread.mean is not None), default=None)",
            EXPERIMENTS,
        ),
        ("a weighted mean is a plain one", "_mean(spread.weighted_mean for", "_mean(spread.mean for", EXPERIMENTS),
        (
            "rows after training are read before it",
            "at = reading.when or when",
            'at = reading.when or "before"',
            EXPERIMENTS,
        ),
        (
            "another file than the runs read is not told",
            "        if had or read:",
            "        if False:",
            VERIFY,
        ),
    ),
    *_of(
        "evidence",
        "results/runs.py",
        (
            "the file that a run read is not kept",
            'about |= {"file": npz_name(run.config), ',
            'about |= {"file": None, ',
            VERIFY,
        ),
        (
            "of a resumed run the first commit and machine are forgotten",
            'earlier = _starts(folder) if "resume" in more else []',
            "earlier = []",
            f"{EXPERIMENTS}::test_results_name_each_commit_and_machine_that_a_run_was_made_with",
        ),
    ),
    *_of(
        "evidence",
        "results/verify.py",
        ("curves are not compared", "if different and not first:", "if False:", VERIFY),
        ("what differs by little agrees", "if value != new)", "if round(value, 6) != round(new, 6))", VERIFY),
        (
            "a run with portable kernels is made again with native ones",
            "return self.run.kernels",
            'return "native"',
            VERIFY,
        ),
    ),
    *_of(
        "evidence",
        "results/runs.py",
        (
            "a run of another seed is the same run",
            "if key not in _REAL_NODES}",
            'if key not in (*_REAL_NODES, "seed")}',
            EXPERIMENTS,
        ),
        (
            "a run that used no reply is done",
            "if nothing := read_run(run).nothing_used:",
            'if nothing := "":',
            EXPERIMENTS,
        ),
    ),
    *_of(
        "evidence",
        "results/conditions.py",
        (
            "a run that went on with native kernels counts as portable",
            "for part in parts_of(config)}",
            "for part in (config,)}",
            "tests/test_kernels.py",
        ),
    ),
    *_of(
        "evidence",
        "results/engines.py",
        (
            "results name a commit that did not run",
            "begins(self._commit)",
            "begins(commit(self._app))",
            f"{EXPERIMENTS}::test_results_name_the_commit_whose_code_ran",
        ),
        (
            "the engine's process has native kernels",
            "importing_from(self._app) | variables(kernels)",
            "importing_from(self._app)",
            VERIFY,
        ),
    ),
    *_of(
        "evidence",
        "results/jobs.py",
        (
            "a run that two tables want is made twice",
            "wanted.setdefault(runs.folder(job.spec).name, [])",
            "wanted.setdefault(str(id(job)), [])",
            EXPERIMENTS,
        ),
        ("the other runs are not told that this one was stopped", "stopped.set()", "pass", EXPERIMENTS),
        (
            "runs at the same time wait for each other",
            "ThreadPoolExecutor(runs.engine.at_once)",
            "ThreadPoolExecutor(1)",
            EXPERIMENTS,
        ),
    ),
    *_of(
        "engine",
        "common/resources.py",
        ("each of several runs takes all CPUs", "own = total // runs + (place < total % runs)", "own = total", ENGINE),
        ("each of several runs takes the same GPU", "[place::runs]", "[::runs]", ENGINE),
    ),
    *_of(
        "engine",
        "client_app/runtime.py",
        ("on a GPU sums have no order", "        _add_in_order()\n", "        pass\n", "tests/test_runtime.py"),
    ),
    *_of(
        "engine",
        "engine/supervisor.py",
        (
            "a run on a GPU starts with clients that get none",
            'if config.device.startswith("cuda"):',
            'if config.device.startswith("cuda") and plan.resources.workers == 0:',
            ENGINE,
        ),
        (
            "that clients get no GPU is not told",
            'if config.device == "auto" and count_gpus():',
            'if config.device == "cuda" and count_gpus():',
            ENGINE,
        ),
        (
            "a terminal that closes kills the run",
            "before = at_end(stop) | {",
            "before = {",
            "tests/test_engine.py::test_a_terminal_that_closes_stops_a_run_unless_it_is_to_go_on",
        ),
    ),
    *_of(
        "engine",
        "strategies/core/exchange.py",
        (
            "a round's messages are delivered in the next one",
            "        if isinstance(grid, LocalGrid):",
            "        if False:",
            "tests/test_engine.py::test_messages_of_a_round_that_is_over_are_not_delivered",
        ),
    ),
    *_of(
        "evidence",
        "results/runs.py",
        (
            "a run with more processes is another run",
            "return keys | {_FEDERATION: clients_alone(federation)}",
            "return keys | {_FEDERATION: federation}",
            EXPERIMENTS,
        ),
        (
            "results name a GPU that no client got",
            'found["gpus"] if self.engine.gpus(federation) else []',
            'found["gpus"]',
            EXPERIMENTS,
        ),
        (
            "a run that read other data is verified",
            'if has or self._exact or values["dataset"] in _OWN_DATA:',
            'if has or values["dataset"] in _OWN_DATA:',
            "tests/test_verify.py::test_a_run_that_read_other_data_is_told_and_made_again_to_verify",
        ),
        (
            "a run that is killed twice begins anew",
            "if not _ended(before) and _resumed(before) > resumed:",
            "if False:",
            "tests/test_experiments.py::test_a_run_that_goes_on_and_is_killed_again_is_kept",
        ),
        (
            "a half-done run goes on with other data",
            "if _resumable(before) and otherwise and not self._exact:",
            "if False:",
            "tests/test_experiments.py::test_a_run_that_is_half_done_does_not_go_on_with_other_data",
        ),
    ),
    *_of(
        "evidence",
        "results/jobs.py",
        (
            "a damaged run of a sweep stops the others",
            "if runs.done(job.spec) and (reason := _unreadable(runs, job)):",
            "if False and (reason := _unreadable(runs, job)):",
            "tests/test_experiments.py::test_a_damaged_run_of_a_sweep_leaves_the_others",
        ),
    ),
    *_of(
        "evidence",
        "common/kernels.py",
        (
            "one library is left with kernels of its own",
            '    "ONEDNN_MAX_CPU_ISA": "AVX2",\n',
            "",
            "tests/test_kernels.py",
        ),
    ),
    *_of(
        "evidence",
        "results/fit.py",
        (
            "the nearest setting is the one of fewest cells",
            "return -len(present), -len(setting.measured), setting.distance() or 0.0",
            "return len(present), len(setting.measured), setting.distance() or 0.0",
            EXPERIMENTS,
        ),
        ("differences of two signs cancel in the distance", "mean(map(abs, found))", "abs(mean(found))", EXPERIMENTS),
        (
            "the paper's own method is fitted, too",
            "not experiment.is_own(place.row)",
            "True",
            EXPERIMENTS,
        ),
        (
            "a key of one method tears settings apart",
            "in product(*(groups.values()",
            "in zip(*(groups.values()",
            "tests/test_experiments.py::test_a_key_of_one_method_leaves_the_trials_of_others_in_every_setting",
        ),
    ),
    *_of(
        "evidence",
        "cli/verify.py",
        (
            "runs with other kernels are verified",
            "kernels), exact=True)",
            "kernels))",
            "tests/test_kernels.py::test_verify_makes_runs_with_the_kernels_of_the_file_alone",
        ),
    ),
    *_of(
        "evidence",
        "results/sweep.py",
        (
            "a place is a key of a grid",
            "if key in PLACES:",
            "if key in ():",
            "tests/test_experiments.py::test_a_place_is_no_key_of_a_grid",
        ),
        (
            "a mean over some clients stands beside those over all",
            "None if last.fewer_before else last.accuracy",
            "last.accuracy",
            "tests/test_report.py::test_a_mean_over_some_clients_stands_beside_none_over_all",
        ),
    ),
    *_of(
        "evidence",
        "results/ranking.py",
        (
            "with many seeds the quantile is that of the normal distribution",
            "{60: 2.042, 120: 2.000}, 1.980",
            "{}, 1.960",
            "tests/test_ranking.py::test_the_quantiles_are_those_of_the_t_distribution_or_a_little_more",
        ),
    ),
    *_of(
        "evidence",
        "results/watch.py",
        (
            "of a large sweep those are shown whose cells' names sort last",
            "return run.name, run",
            "return run.parent.name, run",
            "tests/test_watch.py::test_of_a_large_sweep_the_newest_runs_are_shown",
        ),
    ),
    *_of(
        "evidence",
        "results/tables.py",
        (
            "global models and clients that train are compared before training",
            "left_out = column in mixed and run.of_all_before",
            "left_out = False",
            "tests/test_experiments.py",
        ),
    ),
    *_of(
        "evidence",
        "common/stream.py",
        (
            "a log's line is taken for the number of the run",
            "        if not run_id and (found := STARTED.search(line)):",
            "        if found := STARTED.search(line):",
            "tests/test_stream.py::test_the_exit_code_tells_whether_the_run_finished",
        ),
        (
            "a run that failed ends with the code of one that finished",
            '    if status == "finished:completed":\n        return 0',
            '    if status.startswith("finished"):\n        return 0',
            "tests/test_stream.py::test_the_exit_code_tells_whether_the_run_finished",
        ),
        (
            "leaving the log of a run has the code of a run that finished",
            '        return _say(f"run {run_id} goes on without its log here; {hints}", 128 + ended[0])',
            '        return _say(f"run {run_id} goes on without its log here; {hints}", 0)',
            "tests/test_stream.py::test_the_log_of_a_run_that_goes_on_is_left",
        ),
    ),
    *_of(
        "evidence",
        "results/runs.py",
        (
            "what stands beside a run counts for whichever run is there",
            'return bool(json.loads((folder / _ABOUT).read_text(encoding="utf-8"))["run"] == run.name)',
            'return bool(json.loads((folder / _ABOUT).read_text(encoding="utf-8"))["run"])',
            "tests/test_kernels.py::test_a_run_is_told_of_though_its_program_was_killed_when_it_was_made",
        ),
    ),
    *_of(
        "evidence",
        "results/runs.py",
        (
            "a finished run whose history was cut counts",
            "if run.cut_short:",
            "if False:",
            "tests/test_experiments.py::test_a_damaged_run_of_a_sweep_leaves_the_others",
        ),
    ),
    *_of(
        "privacy",
        "strategies/core/protection.py",
        (
            "a simulation that is resumed pays for rounds that it makes again",
            "if n > checkpointed and release == self._release()}",
            "if False}",
            "tests/test_resume.py::test_a_resumed_simulation_ends_where_its_budget_does",
        ),
    ),
    *_of(
        "privacy",
        "strategies/core/protection.py",
        (
            "a simulation that is resumed notes its rounds twice",
            "            if (server_round, release) in again:\n",
            "            if False:\n",
            "tests/test_resume.py::test_a_resumed_simulation_ends_where_its_budget_does",
        ),
    ),
    *_of(
        "rounds",
        "server_app/rounds.py",
        (
            "the round that spends the budget is not the last",
            "        last = spent or server_round == config.rounds\n",
            "        last = server_round == config.rounds\n",
            "tests/test_resume.py::test_a_resumed_simulation_ends_where_its_budget_does",
        ),
    ),
    *_of(
        "rounds",
        "server_app/rounds.py",
        (
            "the round before nobody has a budget is not kept",
            "strategy.session.checkpointed < history[-1].round:",
            "strategy.session.checkpointed < 0:",
            "tests/test_privacy.py::test_a_run_whose_last_client_with_a_budget_goes_away_keeps_its_last_round",
        ),
    ),
    *_of(
        "rounds",
        "server_app/app.py",
        (
            "a personal model that finds no room counts as exported",
            "                missing[name] = answer.unwritten\n",
            '                log.error("%s", answer.unwritten)\n',
            "tests/test_resume.py::test_personal_models_that_find_no_room_are_written_when_the_run_is_resumed",
        ),
    ),
    *_of(
        "state",
        "common/durable.py",
        (
            "what cannot be read now counts as damaged",
            "raise (DamagedError if gone else UnreadableError)(",
            "raise DamagedError(",
            "tests/test_state.py::test_what_cannot_be_read_now_is_no_reason_to_go_on_from_something_older",
        ),
    ),
    *_of(
        "state",
        "client_app/state.py",
        (
            "a folder that cannot be read has no versions",
            '            raise UnreadableError(f"{self.directory} cannot be read ({error.strerror})") from error',
            "            return []",
            "tests/test_state.py::test_what_cannot_be_read_now_is_no_reason_to_go_on_from_something_older",
        ),
    ),
    *_of(
        "state",
        "client_app/state.py",
        (
            "a version that cannot be read now is forgotten",
            "            return True  # it may be, so it is not forgotten",
            "            return False",
            "tests/test_state.py::test_what_cannot_be_read_when_a_version_is_kept_is_not_forgotten",
        ),
    ),
    *_of(
        "aggregation",
        "strategies/core/spool.py",
        (
            "a full disk is the fault of the client whose reply finds no room",
            "class SpoolError(Exception):",
            "from common.errors import FloretError\n\n\nclass SpoolError(FloretError):",
            "tests/test_aggregation.py::test_replies_that_find_no_room_on_the_disk_end_the_run_and_no_client_is_refused",
        ),
    ),
    *_of(
        "aggregation",
        "strategies/core/spool.py",
        (
            "replies wait in the system's temporary folder",
            "self._folder = folder or Path(tempfile.gettempdir())",
            "self._folder = Path(tempfile.gettempdir())",
            "tests/test_aggregation.py::test_replies_that_find_no_room_on_the_disk_end_the_run_and_no_client_is_refused",
        ),
    ),
    *_of(
        "rounds",
        "server_app/app.py",
        (
            "a simulation goes on with other data",
            "    if had != digest:",
            "    if False:",
            "tests/test_resume.py::test_a_simulation_is_not_resumed_with_a_file_that_was_replaced",
        ),
    ),
    *_of(
        "evidence",
        "results/engines.py",
        (
            "what ended a run's process is not told",
            "            if process.returncode < 0:\n",
            "            if False:\n",
            "tests/test_experiments.py::test_a_run_that_goes_on_and_is_killed_again_is_kept",
        ),
    ),
    *_of(
        "rounds",
        "server_app/app.py",
        (
            "a client whose state is damaged keeps a simulation from its end",
            '            log.error("The personal model of client %s was not exported: %s", name, reason)\n',
            "            missing[name] = str(reason)\n",
            "tests/test_resume.py::test_a_run_finishes_without_the_personal_model_of_a_client_whose_state_is_damaged",
        ),
    ),
    *_of(
        "rounds",
        "server_app/app.py",
        (
            "a run without checkpoints is told to be resumed",
            "if rounds and session.checkpointed == rounds[-1].round:",
            "if rounds:",
            "tests/test_resume.py::test_personal_models_that_find_no_room_are_told_where_no_checkpoint_is",
        ),
    ),
    *_of(
        "privacy",
        "strategies/core/protection.py",
        (
            "a resumed simulation does not pay for what it released with other noise",
            "if n > checkpointed and release == self._release()}",
            "if n > checkpointed}",
            "tests/test_resume.py::test_a_simulation_that_is_resumed_with_other_noise_pays_for_what_it_has_released",
        ),
    ),
    *_of(
        "rounds",
        "server_app/rounds.py",
        (
            "a budget counts for those who are there alone",
            "clients = strategy.roster.present() or list(strategy.roster)",
            "clients = strategy.roster.present()",
            "tests/test_privacy.py::test_the_round_that_spends_what_all_have_is_the_last_though_all_go_away",
        ),
    ),
    *_of(
        "rounds",
        "server_app/app.py",
        (
            "the summary of a run that its budget ends is of an earlier round",
            "History(rounds, last, config.evaluate_every)",
            "History(rounds, config.rounds, config.evaluate_every)",
            "tests/test_resume.py::test_a_run_that_its_budget_ends_is_that_of_its_last_round_whoever_goes_away_in_it",
        ),
    ),
    *_of(
        "evidence",
        "results/follow.py",
        (
            "a run that its budget ended is shown as killed",
            "return self.planned if self._ended is None else self._ended",
            "return self.planned",
            "tests/test_resume.py::test_a_run_that_its_budget_ends_is_that_of_its_last_round_whoever_goes_away_in_it",
        ),
    ),
    *_of(
        "state",
        "client_app/state.py",
        (
            "a version that cannot be read counts for nothing",
            "            if number > newest:\n",
            "            if False:\n",
            "tests/test_state.py::test_what_cannot_be_read_now_is_no_reason_to_go_on_from_something_older",
        ),
    ),
    *_of(
        "state",
        "client_app/state.py",
        (
            "a version that could not be read is removed",
            "numbers = [*(version.number for version in versions), *self.unreadable]",
            "numbers = [version.number for version in versions]",
            "tests/test_state.py::test_what_cannot_be_read_now_is_no_reason_to_go_on_from_something_older",
        ),
    ),
    *_of(
        "evidence",
        "results/engines.py",
        (
            "an earlier error hides what ended a run's process",
            "    if lines and lines[-1].startswith(_ENDED):\n",
            "    if False:\n",
            "tests/test_experiments.py::test_what_ended_a_process_is_the_reason_whatever_was_wrong_before",
        ),
    ),
    *_of(
        "privacy",
        "common/privacy/opacus.py",
        (
            "a protected run says each line twice",
            "    _ROOT.handlers[:] = _BEFORE[0]\n",
            "    pass\n",
            "tests/test_privacy.py::test_a_protected_run_says_everything_once",
        ),
    ),
    *_of(
        "data",
        "data/clients.py",
        (
            "a file that was altered is not read anew by the next run",
            "    if _seen.setdefault(place, now) != now:",
            "    if _seen.setdefault(place, now) is None:",
            "tests/test_data.py::test_a_file_that_was_altered_is_read_anew_by_the_next_run",
        ),
    ),
    *_of(
        "data",
        "data/clients.py",
        (
            "a dataset is read anew by each run",
            "    if _seen.setdefault(place, now) != now:",
            "    if _seen.setdefault(place, now) is not None:",
            "tests/test_data.py::test_a_file_that_was_altered_is_read_anew_by_the_next_run",
        ),
    ),
    *_of(
        "data",
        "data/datasets.py",
        (
            "images of a pool that were altered are kept",
            "        return [*lists, *(Path(file) for part in parts for file in find_images(part, names).files)]",
            "        return [*lists, *parts]",
            "tests/test_data_images.py::test_an_image_that_was_altered_is_read_anew_by_the_next_run",
        ),
    ),
    *_of(
        "engine",
        "engine/checks.py",
        (
            "a warm engine keeps the data of the run before",
            "        data.forget_altered(config)\n",
            "        pass\n",
            "tests/test_experiments.py::test_a_run_reads_the_file_that_there_is_when_it_begins",
        ),
    ),
    *_of(
        "evidence",
        "results/conditions.py",
        (
            "a file whose content changed is the same data",
            "        return [] if had == has else ",
            "        return [] if True else ",
            "tests/test_verify.py::test_what_a_file_contains_counts_not_where_it_lies",
        ),
    ),
    *_of(
        "evidence",
        "results/conditions.py",
        (
            "the same content elsewhere is other data",
            "    if had and has:\n        return []",
            "    if had and has and had != has:\n        return []",
            "tests/test_verify.py::test_what_a_file_contains_counts_not_where_it_lies",
        ),
    ),
    *_of(
        "evidence",
        "results/verify.py",
        (
            "of other data only the name is compared",
            'if old["digest"] and new["digest"] else ("data", "file")',
            'if False else ("data", "file")',
            "tests/test_verify.py::test_of_other_data_their_digests_are_told",
        ),
    ),
    *_of(
        "data",
        "data/clients.py",
        (
            "a digest is of the order in which files are found",
            "named = sorted((path",
            "named = list((path",
            "tests/test_data.py::test_a_digest_is_that_of_what_the_files_contain",
        ),
    ),
    *_of(
        "data",
        "data/clients.py",
        (
            "a digest is of an altered file as it was",
            "return _digest(tuple(files), _stamps(files)) if files else None",
            "return _digest(tuple(files), ()) if files else None",
            "tests/test_data.py::test_a_digest_is_that_of_what_the_files_contain",
        ),
    ),
    *_of(
        "nodes",
        "client_app/node/transport.py",
        (
            "a message whose run ended while it came can still be claimed",
            "        for task in state.get_tasks(**of_run, statuses=[Status.PENDING]):\n",
            "        for task in []:\n",
            "tests/test_supernode.py",
        ),
    ),
    *_of(
        "nodes",
        "client_app/node/transport.py",
        (
            "the SuperNode waits for a reply to a message that it did not receive",
            "        return None\n\n    return pull_or_drop",
            "        return run_id\n\n    return pull_or_drop",
            "tests/test_supernode.py",
        ),
    ),
    *_of(
        "nodes",
        "client_app/node/transport.py",
        (
            "a node that stops waits for the rest of a message",
            '            if not go():\n                raise NotReceivedError("this node stops")\n',
            "",
            "tests/test_nodes.py",
        ),
    ),
    *_of(
        "figures",
        "results/run.py",
        (
            "accuracies that nodes round are quoted as exact",
            "        return not_exact(data.accuracies for data in self.clients.values())\n",
            '        return ""\n',
            "tests/test_history.py",
        ),
    ),
    *_of(
        "policy",
        "client_app/app.py",
        (
            "a node says that its accuracies are exact whatever its policy does",
            "policy.accuracies if policy else EXACT",
            "EXACT",
            "tests/test_policy.py",
        ),
    ),
    *_of(
        "audit",
        "client_app/audit.py",
        (
            "an audit line has a run's number as a number",
            '"run": str(message.metadata.run_id),',
            '"run": message.metadata.run_id,',
            "tests/test_policy.py",
        ),
    ),
    *_of(
        "command line",
        "common/stream.py",
        (
            "an error of flwr list is told by the last line of its JSON",
            '        said = str(answer["error-message"])\n',
            "",
            "tests/test_stream.py",
        ),
    ),
    *_of(
        "config",
        "common/run_config.py",
        (
            "a key that is there twice is not named",
            '    if twice:\n        raise ConfigError(f"{of} {text!r}: {twice} is there twice; give it once")\n',
            "",
            "tests/test_config.py",
        ),
    ),
    *_of(
        "config",
        "common/resources.py",
        (
            "a client may have more CPUs than Ray has",
            '    if cpus > total and "RAY_ADDRESS" not in os.environ:\n',
            "    if False:\n",
            "tests/test_config.py",
        ),
    ),
    *_of(
        "engine",
        "common/resources.py",
        (
            "a client may have more CPUs than the local engine has",
            "        if own < cpus:\n",
            "        if runs > 1 and own < cpus:\n",
            "tests/test_engine.py",
        ),
    ),
    *_of(
        "command line",
        "cli/state.py",
        (
            "what nobody confirmed counts as an interrupt",
            "        if sys.stdin.isatty():\n            raise\n",
            "        raise\n",
            "tests/test_state_command.py",
        ),
    ),
    *_of(
        "command line",
        "results/curve.py",
        (
            "a curve over seeds is drawn",
            '        if key == "seed":\n',
            '        if key == "seeds":\n',
            "tests/test_curve.py",
        ),
    ),
    *_of(
        "command line",
        "common/flower.py",
        (
            "a SuperLink connection that is not there is not named",
            '    if wrong:\n        raise ConfigError(f"SuperLink connection',
            '    if False:\n        raise ConfigError(f"SuperLink connection',
            "tests/test_config.py",
        ),
    ),
    *_of(
        "delivery",
        "common/flower.py",
        (
            "an answer that began to come is asked for anew",
            "            self._begun[message_id] = begun\n",
            "            pass\n",
            "tests/test_replies.py",
        ),
    ),
    *_of(
        "delivery",
        "common/flower.py",
        (
            "parts of an answer whose message is out of time are kept",
            "        self._begun = {key: begun for key, begun in self._begun.items() if key in known}\n",
            "        pass\n",
            "tests/test_replies.py",
        ),
    ),
    *_of(
        "delivery",
        "common/flower.py",
        (
            "the server waits for the parts of an answer",
            "take, max_tries_per_object=1)",
            "take, max_tries_per_object=4)",
            "tests/test_replies.py",
        ),
    ),
    *_of(
        "delivery",
        "common/flower.py",
        (
            "an answer whose parts are gone ends the run",
            "        except ObjectIdNotPreregisteredError as error:\n            raise FloretError(",
            "        except ZeroDivisionError as error:\n            raise FloretError(",
            "tests/test_replies.py",
        ),
    ),
    *_of(
        "nodes",
        "client_app/node/transport.py",
        (
            "the reply to a message that came at the end of its run is taken for the next one",
            "            return int(metadata.run_id)\n",
            "            pass\n",
            "tests/test_supernode.py",
        ),
    ),
    *_of(
        "nodes",
        "client_app/node/transport.py",
        (
            "a task that the SuperNode has given up ends the node",
            "        return bool(error.code() == grpc.StatusCode.UNAUTHENTICATED)\n",
            "        if error:\n            raise\n",
            "tests/test_supernode.py",
        ),
    ),
    *_of(
        "nodes",
        "client_app/node/transport.py",
        (
            "a reply that the SuperNode does not take starts another SuperNode",
            "                if stored or error.code() != grpc.StatusCode.UNAUTHENTICATED:\n",
            "                if error:\n",
            "tests/test_supernode.py",
        ),
    ),
    *_of(
        "nodes",
        "client_app/node/transport.py",
        (
            "a wrong clock is not told",
            "                        self.code = WRONG_CLOCK\n",
            "                        pass\n",
            "tests/test_supernode.py",
        ),
    ),
    *_of(
        "nodes",
        "client_app/node/transport.py",
        (
            "a SuperNode goes on without its heartbeats",
            "    threading.excepthook = reason.thread_ended\n",
            "",
            "tests/test_supernode.py",
        ),
    ),
    *_of(
        "nodes",
        "client_app/node/transport.py",
        (
            "a connection that the network forgot stays for 15 minutes",
            '        ("grpc.keepalive_time_ms", int(1000 * _PING)),\n',
            "",
            "tests/test_supernode.py",
        ),
    ),
    *_of(
        "nodes",
        "client_app/node/transport.py",
        (
            "the SuperNode opens Flower's connection",
            "    connection.create_channel = open_channel  # type: ignore[attr-defined]\n",
            "",
            "tests/test_supernode.py",
        ),
    ),
    *_of(
        "delivery",
        "server_app/delivery.py",
        (
            "an answer whose rest is on its way is asked for again",
            "(late and not begun)",
            "late",
            "tests/test_names.py",
        ),
    ),
    *_of(
        "delivery",
        "server_app/delivery.py",
        (
            "the rest of an answer is not taken once its node was away",
            " or (item.gone is not None and not self._answers.begun(item.message_id)):",
            " or item.gone is not None:",
            "tests/test_names.py",
        ),
    ),
    *_of(
        "figures",
        "server_app/rounds.py",
        (
            "a client that rounds accuracies from now on is not told",
            '"own", "accuracies")',
            '"own")',
            "tests/test_history.py",
        ),
    ),
    *_of(
        "nodes",
        "client_app/node/transport.py",
        (
            "a reply to a message that ended with its run is left for the next one",
            "        if claimed or metadata.message_id in answered:\n",
            "        if claimed:\n",
            "tests/test_supernode.py",
        ),
    ),
    *_of(
        "replies",
        "common/flower.py",
        (
            "an answer may become any number of times what came",
            "        self._unpacked.check()\n",
            "",
            "tests/test_replies.py",
        ),
    ),
    *_of(
        "nodes",
        "client_app/node/transport.py",
        (
            "a message may become any number of times what came",
            "        unpacked.check()\n",
            "",
            "tests/test_supernode.py",
        ),
    ),
    *_of(
        "methods",
        "client_app/methods/apple.py",
        (
            "APPLE keeps relationships under names that cannot be read again",
            "        fit = fit and not any(map(folder_name, names))\n",
            "",
            "tests/test_fedkd_fedcac_apple.py",
        ),
    ),
    *_of(
        "methods",
        "strategies/fedpa.py",
        (
            "FedPA's counts weigh what a client declares",
            "counts * min(1.0, samples / int(counts.sum()))",
            "counts",
            "tests/test_criticalfl_fedpa.py::test_a_head_weighs_no_more_than_the_samples_that_its_client_counts_for",
        ),
    ),
    *_of(
        "delivery",
        "common/flower.py",
        (
            "a SuperLink with too much to do ends the run",
            "            elif error.code() != grpc.StatusCode.RESOURCE_EXHAUSTED:\n",
            "            elif error:\n",
            "tests/test_replies.py",
        ),
    ),
    *_of(
        "replies",
        "strategies/core/base.py",
        (
            "what is handed on is not looked at tensor by tensor",
            "if self.relays or group_of(n) in self._moved}",
            "if False}",
            "tests/test_aggregation.py::test_an_upload_with_all_of_its_size_in_one_small_tensor_stops_nobody",
        ),
    ),
    *_of(
        "replies",
        "strategies/core/update_norms.py",
        (
            "sizes of updates say what is usual of weights",
            "weights[group] if group in weights else self.usual(group) for",
            "self.usual(group) for",
            "tests/test_aggregation.py::test_a_tensor_that_is_absurd_in_a_group_of_a_usual_size",
        ),
    ),
    *_of(
        "delivery",
        "strategies/core/roster.py",
        (
            "a key takes one name after another",
            "if own and own != client.name and not (known and known.key):",
            "if False:",
            "tests/test_names.py::test_a_key_owns_one_name_of_a_run",
        ),
    ),
    *_of(
        "policy",
        "client_app/app.py",
        (
            "a text for the server says where a folder is",
            "    _without_paths(content, request)\n",
            "",
            "tests/test_policy.py::test_no_text_for_the_server_says_where_the_nodes_folders_are",
        ),
    ),
    *_of(
        "policy",
        "client_app/policy.py",
        (
            "batch-size is bounded though there are fewer samples",
            "largest = config.batch_size if config.privacy.on else min(config.batch_size, len(data.train))",
            "largest = config.batch_size",
            "tests/test_policy.py::test_a_batch_of_all_samples_is_one_whatever_the_key_says",
        ),
    ),
    *_of(
        "policy",
        "client_app/policy.py",
        (
            "a refusal of a protected run tells how many samples there are",
            "largest = config.batch_size if config.privacy.on else min(config.batch_size, len(data.train))",
            "largest = min(config.batch_size, len(data.train))",
            "tests/test_policy.py::test_what_a_policy_refuses_is_one_line",
        ),
    ),
    *_of(
        "methods",
        "client_app/methods/fedproto.py",
        (
            "FedProto: a value for each sample, class and feature at once",
            "torch.split(self.prototypes, max(1, VALUES // self.prototypes.shape[1]))",
            "[self.prototypes]",
            "tests/test_formulas.py::test_the_nearest_of_ten_thousand_prototypes_takes_no_value_for_each_sample_class_and_feature",
        ),
    ),
    *_of(
        "evidence",
        "results/runs.py",
        (
            "a client that is slow is left out of its round in a table",
            'keys = {"round-timeout": _PATIENT, **spec.keys,',
            "keys = {**spec.keys,",
            "tests/test_experiments.py::test_a_slow_machine_changes_no_number",
        ),
    ),
    *_of(
        "evidence",
        "results/runs.py",
        (
            "a table has its own round-timeout, whatever the command says",
            'keys = {"round-timeout": _PATIENT, **spec.keys, "output-dir": str(folder), **more}',
            'keys = {**spec.keys, "output-dir": str(folder), **more, "round-timeout": _PATIENT}',
            "tests/test_experiments.py::test_a_slow_machine_changes_no_number",
        ),
    ),
    *_of(
        "replies",
        "strategies/core/update_norms.py",
        (
            "features of networks that nobody has trained say what is usual",
            "aside = group in whole and client not in self._met",
            "aside = False",
            "tests/test_aggregation.py::test_honest_clients_of_feddfpa_that_are_drawn_seldom_are_not_refused",
        ),
    ),
    *_of(
        "replies",
        "strategies/core/update_norms.py",
        (
            "a first upload does not count where nothing else is known",
            "everything = sorted([*counted, *aside]) if counted else aside",
            "everything = counted",
            "tests/test_aggregation.py::test_features_of_networks_that_nobody_has_trained_do_not_say_what_is_usual",
        ),
    ),
    *_of(
        "checkpoint",
        "strategies/core/update_norms.py",
        (
            "after a resume every client is new",
            "self._met = {*_split(arrays[_MET])} if _MET in arrays else set()",
            "self._met = set()",
            "tests/test_aggregation.py::test_features_of_networks_that_nobody_has_trained_do_not_say_what_is_usual",
        ),
    ),
    *_of(
        "replies",
        "strategies/core/update_norms.py",
        (
            "replies do not wait for one another where one group is not known",
            "return self._groups is not None and self._groups <= self._usual.keys()",
            "return bool(self._usual)",
            "tests/test_aggregation.py::test_features_of_networks_that_nobody_has_trained_do_not_say_what_is_usual",
        ),
    ),
    *_of(
        "training",
        "common/sgd.py",
        (
            "a gradient of another memory layout is taken as it lies",
            "if gradient.stride() == parameter.stride():",
            "if True:",
            "tests/test_privacy.py::test_a_step_of_convolutions_on_protected_examples_by_hand",
        ),
    ),
    *_of(
        "methods",
        "client_app/methods/fedkd.py",
        (
            "FedKD: the divergence in bfloat16",
            "own.float().log_softmax(1), other.float().log_softmax(1)",
            "own.log_softmax(1), other.log_softmax(1)",
            "tests/test_fedkd_fedcac_apple.py::test_the_divergence_of_scores_that_are_close_is_more_than_the_rounding_of_bfloat16",
        ),
    ),
    *_of(
        "replies",
        "common/flower.py",
        (
            "an answer may have any number of bytes",
            "            self._bound.check(self._size, len(self._names))\n",
            "",
            "tests/test_replies.py::test_an_answer_that_is_larger_than_any_of_the_run_is_not_kept",
        ),
    ),
    *_of(
        "replies",
        "common/flower.py",
        (
            "an answer may have any number of parts",
            "        bound.check(0, len(self._names))\n",
            "",
            "tests/test_replies.py::test_an_answer_that_is_larger_than_any_of_the_run_is_not_kept",
        ),
    ),
    *_of(
        "nodes",
        "common/stream.py",
        (
            "a SuperLink that does not answer is waited for",
            "check=False, timeout=_PATIENCE",
            "check=False",
            "tests/test_stream.py::test_a_superlink_that_does_not_answer_is_not_waited_for",
        ),
    ),
    *_of(
        "evidence",
        "results/sweep.py",
        (
            "a sweep drops output-dir and resume in silence",
            "for key, instead in SET_BY_COMMAND.items():",
            "for key, instead in {}.items():",
            "tests/test_experiments.py::test_what_a_sweep_sets_itself_is_not_taken_from_the_command",
        ),
    ),
    *_of(
        "evidence",
        "results/evidence.py",
        (
            "a page of evidence where nothing was run",
            '        if not results:\n            raise FloretError(f"{folder}: has',
            '        if False:\n            raise FloretError(f"{folder}: has',
            "tests/test_evidence.py::test_a_folder_without_results_gets_no_page",
        ),
    ),
    *_of(
        "command line",
        "cli/privacy.py",
        (
            "a mistaken --state-dir has spent nothing",
            "    check_state_dir(states)\n",
            "",
            "tests/test_privacy.py::test_the_command_shows_what_was_spent",
        ),
    ),
    *_of(
        "privacy",
        "strategies/core/protection.py",
        (
            "the noised mean is over the expected number also where the number is known",
            "return float(max(1, min(number_drawn(self.config, clients), clients)))",
            "return max(self.config.participation * clients, 1.0)",
            "tests/test_privacy.py::test_the_noised_mean_of_so_many_as_are_drawn_is_over_them",
        ),
    ),
    *_of(
        "checkpoint",
        "server_app/checkpoint.py",
        (
            "a checkpoint has tensors as they lie in memory",
            'np.asarray(array, order="C") for name',
            "array for name",
            "tests/test_resume.py::test_tensors_in_any_order_of_memory_come_back_as_they_were",
        ),
    ),
    *_of(
        "aggregation",
        "strategies/fedpac.py",
        (
            "FedPAC's heads are clipped",
            'unclipped = frozenset({"head", MEAN.removesuffix(".")})',
            "unclipped = frozenset()",
            "tests/test_aggregation.py::test_what_goes_into_no_mean_is_not_clipped",
        ),
    ),
    *_of(
        "methods",
        "strategies/fedpac.py",
        (
            "FedPAC: a mean that was kept back is zero",
            "np.flatnonzero(arrays[COUNTS]).tolist()",
            "()",
            "tests/test_aggregation.py::test_fedpac_combines_no_head_of_a_client_that_keeps_a_mean_back",
        ),
    ),
    *_of(
        "rounds",
        "common/privacy/calibration.py",
        (
            "a draw forgets min-replies",
            "max(1, round(config.participation * clients), config.min_replies)",
            "max(1, round(config.participation * clients))",
            "tests/test_keys.py::test_as_many_clients_are_drawn_as_participation_and_min_replies_say",
        ),
    ),
    *_of(
        "rounds",
        "common/privacy/calibration.py",
        (
            "participation is rounded down",
            "max(1, round(config.participation * clients),",
            "max(1, int(config.participation * clients),",
            "tests/test_keys.py::test_as_many_clients_are_drawn_as_participation_and_min_replies_say",
        ),
    ),
    *_of(
        "policy",
        "client_app/app.py",
        (
            "a text for the server loses its slashes where the data are in the root",
            'if path.startswith("/") and path != "/":',
            'if path.startswith("/"):',
            "tests/test_policy.py::test_a_text_for_the_server_stays_whole_where_the_data_are_in_the_root",
        ),
    ),
    *_of(
        "policy",
        "client_app/node_config.py",
        (
            "half a partition makes a hospital a demo node",
            "            if key in node:\n",
            "            if False:\n",
            "tests/test_policy.py::test_a_partition_that_is_half_named_or_is_none_opens_nothing",
        ),
    ),
    *_of(
        "policy",
        "client_app/node_config.py",
        (
            "partition -1 is the last one",
            "not 0 <= place < count",
            "not place < count",
            "tests/test_policy.py::test_a_partition_that_is_half_named_or_is_none_opens_nothing",
        ),
    ),
    *_of(
        "rounds",
        "server_app/rounds.py",
        (
            "what travelled to and from who was refused is not counted",
            "        list(sent.values()),\n",
            "        (),\n",
            "tests/test_aggregation.py::test_what_travels_counts_whatever_becomes_of_it",
        ),
    ),
    *_of(
        "rounds",
        "strategies/core/base.py",
        (
            "a model is sent to be measured by those that tell nothing",
            "if client.name not in known and self._tells(client)]",
            "if client.name not in known]",
            "tests/test_aggregation.py::test_who_tells_no_accuracy_is_not_sent_a_model_to_measure",
        ),
    ),
    *_of(
        "aggregation",
        "strategies/core/base.py",
        (
            "heads that start from nothing sent are judged as updates",
            "trained = self._trained - self.replaced()",
            "trained = self._trained",
            "tests/test_aggregation.py::test_heads_that_start_from_nothing_sent_are_no_updates",
        ),
    ),
    *_of(
        "privacy",
        "client_app/protection.py",
        (
            "a noised count may make a batch of one example",
            "count = max(count, COUNT.noise)",
            "count = max(count, 1.0)",
            "tests/test_privacy.py::test_a_noised_count_below_its_deviation_makes_no_batch_of_one_example",
        ),
    ),
    *_of(
        "nodes",
        "client_app/node/transport.py",
        (
            "why Flower ended is not told",
            '        if isinstance(end.code, str):\n            log.error("The SuperNode ended: %s", end.code)\n',
            "",
            "tests/test_supernode.py::test_the_supernode_opens_such_a_connection_and_says_why_it_ends",
        ),
    ),
    *_of(
        "nodes",
        "client_app/node/preflight.py",
        (
            "a health address that is in use is found out by Flower only",
            "probe.bind(place)",
            "pass",
            "tests/test_nodes.py::test_a_health_address_that_is_in_use",
        ),
    ),
    *_of(
        "nodes",
        "client_app/node/preflight.py",
        (
            "a host name that cannot be one is a traceback",
            '    except UnicodeError as error:\n        raise FloretError(f"{where}: has no valid host name; name',
            '    except KeyError as error:\n        raise FloretError(f"{where}: has no valid host name; name',
            "tests/test_nodes.py::test_a_host_name_that_is_none",
        ),
    ),
    *_of(
        "replies",
        "strategies/core/replies.py",
        (
            "who cannot take part is not named",
            '        except RefusedError as reason:\n            raise RefusedError(f"{who}: {reason}") from reason',
            "        except RefusedError as reason:\n            raise RefusedError(str(reason)) from reason",
            "tests/test_replies.py::test_a_refusal_names_the_node_where_it_is_another_machine",
        ),
    ),
    *_of(
        "replies",
        "server_app/federation.py",
        (
            "in a simulation a line begins with Flower's random number",
            "        if self._simulated:\n            opened(reply)",
            "        if False:\n            opened(reply)",
            "tests/test_replies.py::test_a_refusal_names_the_node_where_it_is_another_machine",
        ),
    ),
    *_of(
        "nodes",
        "docker/health.py",
        (
            "a container's health check keeps the brackets of an IPv6 address",
            'host = name.strip("[]")',
            "host = name",
            "tests/test_supernode.py::test_a_container_is_healthy_when_what_it_needs_can_be_reached",
        ),
    ),
    *_of(
        "command line",
        "cli/certificates.py",
        (
            "the SuperLink that is printed forgets registered nodes",
            "--database superlink.db ",
            "",
            "tests/test_docs.py::test_every_superlink_remembers_registered_nodes",
        ),
    ),
    *_of(
        "command line",
        "cli/serve.py",
        (
            "without --federation only one called default is served",
            "states_folder(state_dir), federation, method",
            'states_folder(state_dir), federation or "default", method',
            "tests/test_serving.py::test_one_federation_of_another_name_and_several",
        ),
    ),
    *_of(
        "data",
        "data/inputs.py",
        (
            "a text ends at a form feed",
            '.removesuffix("\\n").split("\\n")',
            '.splitlines() or [""]',
            "tests/test_data.py::test_a_text_ends_where_its_line_does",
        ),
    ),
    *_of(
        "data",
        "data/clients.py",
        (
            "the digest reads what is no client's",
            "path.stem.isdecimal() and is_file(path)]",
            "path.stem.isdecimal()]",
            "tests/test_data.py::test_a_digest_is_that_of_what_the_files_contain",
        ),
    ),
    *_of(
        "rounds",
        "strategies/core/base.py",
        (
            "a message without content ends the run",
            "elif message.has_content() and (record",
            "elif (record",
            "tests/test_replies.py::test_by_chance",
        ),
    ),
    *_of(
        "replies",
        "server_app/federation.py",
        (
            "clients with inputs of two types are one federation",
            "said.input_type != self.input_type:",
            "not said.input_type:",
            "tests/test_replies.py::test_images_of_two_types_are_not_one_federation",
        ),
    ),
    *_of(
        "checkpoint",
        "server_app/federation.py",
        (
            "a run that goes on forgets the type of the inputs",
            '        self.input_type = about.get("input-type", "")\n',
            "",
            "tests/test_replies.py::test_images_of_two_types_are_not_one_federation",
        ),
    ),
    *_of(
        "replies",
        "server_app/federation.py",
        (
            "partitions of two divisions are one federation",
            "said.partitions != self._partitions:",
            "said.partitions > 10**6:",
            "tests/test_replies.py::test_partitions_of_two_divisions_are_not_one_federation",
        ),
    ),
    *_of(
        "data",
        "data/npz.py",
        (
            "a header of any length is read",
            "if length > _LONGEST_HEADER:",
            "if length > 2**32:",
            "tests/test_data.py::test_a_header_that_is_longer_than_numpy_takes_is_not_read",
        ),
    ),
    *_of(
        "data",
        "data/npz.py",
        (
            "a pipe in the place of an npz file is waited for",
            "    if status(path) and not is_file(path):\n",
            "    if False:\n",
            "tests/test_data_paths.py::test_what_is_where",
        ),
    ),
    *_of(
        "data",
        "data/datasets.py",
        (
            "the names of classes are in no digest",
            "return [listed] if is_file(listed) and not config.class_names else []",
            "return []",
            "tests/test_data_images.py::test_names_of_classes_that_were_altered_are_read_anew_by_the_next_run",
        ),
    ),
    *_of(
        "data",
        "data/datasets.py",
        (
            "images of MNIST may have any size",
            "        if part.x.shape[1:] != shape:",
            "        if part.x.ndim != 4:",
            "tests/test_data.py::test_idx_files_of_images_of_another_size",
        ),
    ),
    *_of(
        "data",
        "data/clients.py",
        (
            "a node is tested on its training samples",
            "    check_distinct(*(files if has_files else parts))\n",
            "",
            "tests/test_data.py::test_test_samples_that_are_the_training_samples_under_another_name",
        ),
    ),
    *_of(
        "data",
        "data/images.py",
        (
            "a pool's test part may be its training part",
            "        check_distinct(*parts)\n",
            "",
            "tests/test_data_images.py::test_parts_that_are_one_folder",
        ),
    ),
    *_of(
        "data",
        "common/memory.py",
        (
            "a container's limit of memory is not seen",
            "    return min([_available_on_machine(), *_left_in_groups(groups, own)])",
            "    return _available_on_machine()",
            "tests/test_memory.py",
        ),
    ),
    *_of(
        "data",
        "common/memory.py",
        (
            "what was read of files counts as taken",
            "most - taken + int(stat[kept])",
            "most - taken",
            "tests/test_memory.py::test_the_limit_of_a_container_counts",
        ),
    ),
    *_of(
        "rounds",
        "server_app/federation.py",
        (
            "a start waits in silence",
            "elif now > tell:",
            "elif now > tell + 1e9:",
            "tests/test_keys.py::test_a_start_that_waits_says_so_and_leaves_nothing_if_nobody_comes",
        ),
    ),
    *_of(
        "rounds",
        "server_app/app.py",
        (
            "a run that nobody joined leaves an empty folder",
            "    with directory, trackers, StatusWriter(",
            "    with trackers, StatusWriter(",
            "tests/test_keys.py::test_a_start_that_waits_says_so_and_leaves_nothing_if_nobody_comes",
        ),
    ),
    *_of(
        "methods",
        "strategies/criticalfl.py",
        (
            "CriticalFL takes a norm in twice",
            "            self._norm = math.nan\n",
            "",
            "tests/test_criticalfl_fedpa.py::test_a_norm_is_taken_in_once_also_if_the_next_round_has_none",
        ),
    ),
    *_of(
        "methods",
        "client_app/methods/apple.py",
        (
            "APPLE has no proximal term in a run of few rounds",
            "max(int(part * rounds), 1 if part else 0)",
            "int(part * rounds)",
            "tests/test_fedkd_fedcac_apple.py::test_the_proximal_term_fades_out",
        ),
    ),
    *_of(
        "methods",
        "client_app/methods/dispfl.py",
        (
            "DisPFL keeps a mask of another density",
            " or int(self.memory[NEXT + name].sum()) != sparse[name]:",
            ":",
            "tests/test_dfedavgm_dispfl.py::test_a_client_that_comes_from_a_run_of_another_density_gets_a_mask_of_this_one",
        ),
    ),
    *_of(
        "training",
        "client_app/client.py",
        (
            "why batch normalisation cannot learn is PyTorch's line",
            'and "more than 1 value per channel" in str(error)',
            'and "more than 2 values per channel" in str(error)',
            "tests/test_methods.py::test_batch_normalisation_cannot_learn_from_one_value",
        ),
    ),
    *_of(
        "data",
        "data/datasets.py",
        (
            "a dataset that is added is taken for PathMNIST",
            '    if source.dataset not in ("npz", "pathmnist", "image-folder"):',
            '    if source.dataset == "digits":',
            "tests/test_data.py::test_a_dataset_that_is_added_as_contributing_says",
        ),
    ),
    *_of(
        "data",
        "data/datasets.py",
        (
            "a torchvision dataset needs an outline",
            "    if dataset not in _OUTLINES:\n        return parts\n",
            "",
            "tests/test_data.py::test_a_dataset_that_is_added_as_contributing_says",
        ),
    ),
    *_of(
        "models",
        "models/build.py",
        (
            "a model of one layer gets advice that no value follows",
            "        if len(stack) < 2:\n",
            "        if not stack:\n",
            "tests/test_models.py::test_a_model_of_one_layer_cannot_be_split",
        ),
    ),
    *_of(
        "evidence",
        "results/conditions.py",
        (
            "all states of a changed checkout are one",
            '-dirty-{found.hexdigest()[:8]}"',
            '-dirty-00000000"',
            "tests/test_experiments.py::test_the_commit_of_a_run",
        ),
    ),
    *_of(
        "evidence",
        "results/runs.py",
        (
            "runs of other code are not told",
            "        return [*self._otherwise(run, spec), *other_code(then, self._commit)]",
            "        return self._otherwise(run, spec)",
            "tests/test_experiments.py::test_runs_of_other_code_are_told",
        ),
    ),
    *_of(
        "evidence",
        "cli/unused_keys.py",
        (
            "keys of other methods in a grid are not told",
            "not any(key in own_keys(config) for config in configs):",
            "False:",
            "tests/test_experiments.py::test_keys_of_a_grid_that_no_run_uses_are_told",
        ),
    ),
    *_of(
        "evidence",
        "results/curve.py",
        (
            "a curve does not say what was not finished",
            "            if missing := self.missing[panel.name]:",
            "            if missing := self.missing[panel.name][:0]:",
            "tests/test_curve.py::test_runs_that_are_not_finished_are_named",
        ),
    ),
    *_of(
        "evidence",
        "cli/run.py",
        (
            "floret run says nothing of keys that change nothing",
            '    tell_unused({"run config:": given}, [values])\n    if clients',
            "    if clients",
            "tests/test_simulation.py::test_floret_run_with_its_log_tells_that_the_run_failed",
        ),
    ),
    *_of(
        "evidence",
        "cli/sweep.py",
        (
            "a sweep says nothing of keys of every run that change nothing",
            'given = {"-c": parse_run_configs(run_configs), "--grid": grid.varied}',
            'given = {"--grid": grid.varied}',
            "tests/test_experiments.py::test_a_sweep_says_what_of_its_grid_changes_nothing",
        ),
    ),
    *_of(
        "privacy",
        "client_app/app.py",
        (
            "a client that is never drawn pays for nothing",
            "    request.pay_to_join()\n",
            "",
            "tests/test_privacy.py::test_whoever_joins_a_run_with_secret_draws_pays_for_all_of_it",
        ),
    ),
    *_of(
        "privacy",
        "client_app/app.py",
        (
            "who joins pays for a run that no message names",
            'RoundContext.of({**self.scalars, "round": 0}, self.config, over=True)',
            "None",
            f"{PRIVATE}::test_whoever_joins_a_run_with_secret_draws_pays_for_all_of_it",
        ),
    ),
    *_of(
        "privacy",
        "server_app/app.py",
        (
            "who joins is not told of the run",
            "        federation.run = session.scalars()",
            "        federation.run = {}",
            "tests/test_privacy.py::test_who_joins_is_told_of_the_run_where_it_pays_for_it",
        ),
    ),
    *_of(
        "privacy",
        "client_app/app.py",
        (
            "a client that joins without privacy leaves no note",
            "        if self.has_own_data and not self.protects:",
            "        if not joins and self.has_own_data and not self.protects:",
            "tests/test_privacy.py::test_the_command_tells_of_runs_without_privacy_and_of_several_clients",
        ),
    ),
    *_of(
        "privacy",
        "client_app/client.py",
        (
            "that a protected client cannot learn is told",
            "                raise FloretError(reason) from error\n            log",
            "            if reason:\n                raise FloretError(reason) from error\n            log",
            f"{PRIVATE}::test_a_protected_client_that_cannot_learn_sends_noise_and_not_why",
        ),
    ),
    *_of(
        "privacy",
        "client_app/protection.py",
        (
            "FedRep's single step has the noise of one of many",
            "if self._plan.steps == 1 else",
            "if self._passes * self._plan.steps == 1 else",
            "tests/test_privacy.py::test_a_single_step_has_the_noise_of_what_is_released_at_once",
        ),
    ),
    *_of(
        "privacy",
        "common/privacy/accounting.py",
        (
            "epsilon is below 0",
            "return max(0.0, _epsilon_of(composed(releases), delta, accountant))",
            "return _epsilon_of(composed(releases), delta, accountant)",
            "tests/test_privacy.py::test_what_delta_alone_allows_costs_nothing",
        ),
    ),
    *_of(
        "engine",
        "results/engines.py",
        (
            "a further interrupt leaves a sweep's run behind",
            "        except BaseException as error:\n            process.terminate()",
            "        except subprocess.TimeoutExpired as error:\n            process.terminate()",
            "tests/test_experiments.py::test_further_interrupts_leave_no_run_of_a_sweep_behind",
        ),
    ),
    *_of(
        "engine",
        "results/engines.py",
        (
            "a further interrupt ends flwr stop",
            "capture_output=True, check=False, start_new_session=True\n",
            "capture_output=True, check=False\n",
            "tests/test_experiments.py::test_a_further_interrupt_does_not_end_what_stops_a_run_of_a_superlink",
        ),
    ),
    *_of(
        "engine",
        "engine/worker.py",
        (
            "a worker whose server has ended shows a traceback",
            "    with suppress(ConnectionError):\n        connection.send_bytes(to_bytes(what))",
            "    connection.send_bytes(to_bytes(what))",
            "tests/test_engine.py::test_a_worker_whose_server_has_ended_ends_without_a_word",
        ),
    ),
    *_of(
        "engine",
        "engine/supervisor.py",
        (
            "a run stopped at its last moment shows a traceback",
            "                signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it is done, and all is written\n",
            "",
            "tests/test_engine.py::test_a_run_that_is_stopped_at_its_first_or_last_moment_shows_no_traceback",
        ),
    ),
    *_of(
        "state",
        "client_app/state.py",
        (
            "nodes that share a new state directory have two identities",
            "        with locked(state_dir, wait=True, private=True):  #",
            "        with suppress():  #",
            "tests/test_state.py::test_nodes_that_make_the_identity_of_a_directory_at_once_have_the_same",
        ),
    ),
    *_of(
        "state",
        "client_app/state.py",
        (
            "a disk that turns read-only shows a traceback",
            "                with suppress(OSError):  # on a disk that has just",
            "                with suppress():  # on a disk that has just",
            "tests/test_state.py::test_a_disk_that_turns_read_only_at_a_write_is_told_in_a_line",
        ),
    ),
    *_of(
        "delivery",
        "client_app/node/warm.py",
        (
            "an interrupt shows the warm process's traceback",
            '["client_app.node.interrupts", "client_app.node.work", *extra]',
            '["client_app.node.work", *extra]',
            "tests/test_kills.py::test_an_interrupt_while_the_warm_process_is_imported_ends_in_silence",
        ),
    ),
    *_of(
        "engine",
        "common/local_superlink.py",
        (
            "a file that is closed hides the SuperLink's socket",
            "        with suppress(OSError):  # the file was closed meanwhile\n            yield str(entry.readlink())",
            "        yield str(entry.readlink())",
            "tests/test_local_superlink.py::test_a_file_that_is_closed_while_they_are_read_hides_no_other",
        ),
    ),
    *_of(
        "evidence",
        "results/evidence.py",
        (
            "a claim that a column refutes is undecided where seeds differ in another",
            "        if refuted:\n            return MIXED if held else NOT_HELD\n",
            "        if refuted and not undecided:\n            return MIXED if held else NOT_HELD\n",
            "tests/test_evidence.py::test_a_claim_that_a_column_refutes_is_not_undecided",
        ),
    ),
    *_of(
        "evidence",
        "results/evidence.py",
        (
            "a lead that is smaller than claimed is told as none",
            "above = self.claim.by > 0 and all(",
            "above = False and all(",
            "tests/test_evidence.py::test_a_margin_is_judged_to_a_hundredth_and_one_above_by_less_is_said",
        ),
    ),
    *_of(
        "evidence",
        "results/experiment.py",
        (
            "a lead is judged to more digits than papers print",
            "round(ours - theirs, 2)",
            "round(ours - theirs, 6)",
            "tests/test_evidence.py::test_a_margin_is_judged_to_a_hundredth_and_one_above_by_less_is_said",
        ),
    ),
    *_of(
        "evidence",
        "results/ranking.py",
        (
            "the interval is that of one value, not of the mean",
            "stdev(values) / math.sqrt(len(values))",
            "stdev(values)",
            "tests/test_evidence.py::test_three_seeds_give_an_interval",
        ),
    ),
    *_of(
        "policy",
        "client_app/audit.py",
        (
            "the audit file counts the headers of tensors",
            '"bytes": bytes_of(array), "norm"',
            '"bytes": len(array.data), "norm"',
            "tests/test_policy.py::test_the_audit_file_has_what_left",
        ),
    ),
    *_of(
        "privacy",
        "strategies/local.py",
        (
            "a method that sends nothing takes a unit of privacy",
            "if config.privacy.on:",
            "if False:",
            "tests/test_privacy.py::test_a_mistake_is_one_line",
        ),
    ),
    *_of(
        "server",
        "strategies/core/replies.py",
        (
            "a client that answered too late is told in Flower's words",
            "    if is_over(message):\n",
            "    if False:\n",
            "tests/test_replies.py::test_a_message_that_flower_holds_no_longer_is_no_answer",
        ),
    ),
    *_of(
        "state",
        "common/durable.py",
        (
            "a link is followed where a file is to be written",
            "flags | os.O_NOFOLLOW | os.O_NONBLOCK,",
            "flags | os.O_NONBLOCK,",
            "tests/test_state.py::test_a_log_or_a_history_that_is_a_link_is_not_written",
        ),
    ),
    *_of(
        "state",
        "common/durable.py",
        (
            "a second name of another file is written",
            "free = free and there.st_uid == os.geteuid() and there.st_nlink == 1",
            "free = free and there.st_uid == os.geteuid()",
            "tests/test_state.py::test_what_a_stranger_left_under_the_name_of_the_new_file_is_not_written",
        ),
    ),
    *_of(
        "state",
        "common/durable.py",
        (
            "a file is read before its size is looked at",
            "            if size is not None and found != size:\n",
            "            if size is not None and found != size and len(file.read()) != size:\n",
            "tests/test_state.py::test_a_file_of_another_size_is_not_read",
        ),
    ),
    *_of(
        "privacy",
        "client_app/protection.py",
        (
            "a message has a client pay for any number of starts",
            "if len(due) > _MOST_STARTS:",
            "if False:",
            "tests/test_privacy.py::test_joining_a_run_that_is_paid_for_counts_as_a_round_and_has_a_bound",
        ),
    ),
    *_of(
        "privacy",
        "client_app/app.py",
        (
            "joining a run that is paid for does not count in a day",
            "pay_in_advance(self.config, account, self._count_round)",
            "pay_in_advance(self.config, account)",
            "tests/test_privacy.py::test_joining_a_run_that_is_paid_for_counts_as_a_round_and_has_a_bound",
        ),
    ),
    *_of(
        "policy",
        "strategies/core/method.py",
        (
            "what a generator makes is not counted",
            "        return sum(sizes) + cls.made_values(setup)",
            "        return sum(sizes)",
            "tests/test_policy.py::test_what_a_generator_makes_counts",
        ),
    ),
    *_of(
        "policy",
        "client_app/app.py",
        (
            "a server writes into a node's log",
            "said = printable(str(error))",
            "said = str(error)",
            "tests/test_policy.py::test_a_line_of_the_log_has_no_codes_and_is_not_long",
        ),
    ),
    *_of(
        "config",
        "common/yamlfile.py",
        (
            "aliases of YAML are followed",
            "if self.check_event(yaml.AliasEvent):",
            "if False:",
            "tests/test_config.py::test_an_alias_is_refused",
        ),
    ),
    *_of(
        "methods",
        "strategies/core/simplex.py",
        (
            "FedPAC: energies that differ by many orders end the run",
            "if not (moved > 0).any():  # rounding has spoilt the form",
            "if False:",
            "tests/test_fedpac_fedgh_gpfl.py::test_a_form_that_rounding_spoils_has_a_combination_all_the_same",
        ),
    ),
    *_of(
        "evidence",
        "results/report.py",
        (
            "a private and an open run are compared without a word of it",
            '"none" if key == "privacy.unit" else MISSING',
            "MISSING",
            "tests/test_report.py::test_a_comparison_tells_of_privacy_and_of_the_number_of_clients",
        ),
    ),
    *_of(
        "evidence",
        "results/report.py",
        (
            "another number of clients is told nowhere",
            'return found + ["clients"] * (len({value_of(run, "clients") for run in runs}) > 1)',
            "return found",
            "tests/test_report.py::test_a_comparison_tells_of_privacy_and_of_the_number_of_clients",
        ),
    ),
    *_of(
        "evidence",
        "results/text.py",
        (
            "a cut makes names of runs the same",
            "if cuts.count(one) > 1 else one",
            "if False else one",
            "tests/test_report.py::test_names_that_a_cut_would_make_the_same_are_not_cut",
        ),
    ),
    *_of(
        "evidence",
        "results/follow.py",
        (
            "the time of a client's measurement is that of its training",
            "self.seconds = part.seconds if part.trained and part.seconds is not None else self.seconds",
            "self.seconds = part.seconds if part.seconds is not None else self.seconds",
            "tests/test_watch.py::test_the_time_of_a_client_is_that_of_its_last_training",
        ),
    ),
    *_of(
        "checkpoint",
        "results/rundir.py",
        (
            "a run that is over keeps its directory until Python clears it away",
            "        self._lock.close()\n\n    @classmethod",
            "\n    @classmethod",
            "tests/test_runtime.py::test_a_run_that_is_over_has_given_its_directory_back",
        ),
    ),
    *_of(
        "methods",
        "client_app/methods/apple.py",
        (
            "APPLE keeps a core model of every name that it was ever told",
            "for name, tensor in self.memory.items() if name in peers}",
            "for name, tensor in self.memory.items() if peers}",
            "tests/test_fedkd_fedcac_apple.py::test_what_is_kept_of_others_is_of_those_that_the_server_lists",
        ),
    ),
    *_of(
        "nodes",
        "common/flower.py",
        (
            "a log in a file has codes of colours",
            "colored=sys.stderr.isatty() and not os",
            "colored=not os",
            "tests/test_engine.py::test_a_log_has_colours_on_a_terminal",
        ),
    ),
    *_of(
        "nodes",
        "common/flower.py",
        (
            "a log has colours where NO_COLOR is set",
            'colored=sys.stderr.isatty() and not os.environ.get("NO_COLOR")',
            "colored=sys.stderr.isatty()",
            "tests/test_engine.py::test_a_log_has_colours_on_a_terminal",
        ),
    ),
    *_of(
        "nodes",
        "client_app/node/supervisor.py",
        (
            "a node's log has no times",
            "        format_log(times=True)\n        for kind",
            "        format_log()\n        for kind",
            "tests/test_nodes.py::test_real_nodes_give_the_numbers_of_the_other_ways",
        ),
        (
            "a node's messages are logged with colours wherever they go",
            "        format_log(times=True)\n        for kind",
            "        for kind",
            "tests/test_nodes.py::test_real_nodes_give_the_numbers_of_the_other_ways",
        ),
    ),
    *_of(
        "evidence",
        "results/sweep.py",
        (
            "a sweep does not say which runs are not in its table",
            "            if summary is None:\n                notes",
            "            if summary is None and outcome:\n                notes",
            "tests/test_experiments.py::test_a_damaged_run_of_a_sweep_leaves_the_others",
        ),
    ),
    *_of(
        "evidence",
        "results/sweep.py",
        (
            "a sweep does not say that figures are of some of the clients",
            'notes.append(f"{self._label(keys)}: accuracies are over {over}")',
            "notes.extend(())",
            "tests/test_experiments.py::test_a_sweep_says_which_figures_are_of_some_of_the_clients",
        ),
    ),
    *_of(
        "figures",
        "results/run.py",
        (
            "a report is silent on a run of which no reply was used",
            "        if not self.rounds or any(client.trained ",
            "        if not self.rounds or any(client.before ",
            "tests/test_report.py::test_a_run_of_which_no_reply_was_used_says_so",
        ),
    ),
    *_of(
        "figures",
        "results/follow.py",
        (
            "the watch page tells epsilon without its unit",
            "f\"per {run.setting('privacy.unit')}, ",
            'f"',
            "tests/test_watch.py::test_the_unit_of_privacy_is_told",
        ),
    ),
    *_of(
        "delivery",
        "strategies/core/exchange.py",
        (
            "who left before it was asked is said to have been too slow",
            'yield unreadable(message, "its node left before it was asked")',
            "pass",
            "tests/test_names.py::test_a_client_that_leaves_before_it_is_asked_and_stays_away_is_said_to_have",
        ),
    ),
    *_of(
        "delivery",
        "server_app/delivery.py",
        (
            "who left before it was asked is not asked when it is back",
            "                if not item.message_id:\n",
            "                if not item.message_id and not node:\n",
            "tests/test_names.py::test_a_client_that_leaves_before_it_is_asked_is_asked_when_it_is_back",
        ),
    ),
    *_of(
        "delivery",
        "common/flower.py",
        (
            "a SuperLink that takes no messages is not asked again",
            "    for pause in _PAUSES:\n",
            "    for pause in ():\n",
            "tests/test_names.py::test_a_superlink_that_takes_no_messages_is_asked_again",
        ),
    ),
    *_of(
        "delivery",
        "server_app/delivery.py",
        (
            "a question after a message does not tell of the run",
            "            config = ConfigRecord({**self._federation.run})\n            probe",
            "            config = ConfigRecord()\n            probe",
            "tests/test_names.py::test_a_question_after_a_message_tells_of_the_run_as_the_first_one_did",
        ),
    ),
    *_of(
        "privacy",
        "client_app/client.py",
        (
            "what is spent in a simulation is looked at on another device than the model",
            "torch.isfinite(tensor).all().to(self.device) for",
            "torch.isfinite(tensor).all() for",
            "tests/test_rehearsal.py::test_a_protected_message_of_a_simulation_on_the_device",
        ),
    ),
    *_of(
        "training",
        "client_app/methods/fedprox.py",
        (
            "the proximal term has half its gradient",
            "apart.mul_(2 * gradient)",
            "apart.mul_(gradient)",
            "tests/test_formulas.py::test_the_gradient_of_the_proximal_term_is_autograds_to_the_bit",
        ),
    ),
    *_of(
        "command line",
        "client_app/serving.py",
        (
            "a state from before a key existed cannot be used",
            '"data-seed": -1, ',
            "",
            "tests/test_serving.py::test_a_state_from_before_a_key_existed_is_used",
        ),
    ),
    *_of(
        "nodes",
        "client_app/node/options.py",
        (
            "a path that Flower's node config cannot have starts a SuperNode again and again",
            "if path and ('\"' in str(path) or not str(path).isprintable()):",
            "if path and not str(path).isprintable() and not path.exists():",
            "tests/test_nodes.py::test_options_that_cannot_be_used",
        ),
    ),
    *_of(
        "nodes",
        "common/run_config.py",
        (
            "a path with signs beyond the basic plane does not come to a node",
            "json.dumps(value, ensure_ascii=False)",
            "json.dumps(value)",
            "tests/test_config.py::test_texts_come_to_flower_as_they_are",
        ),
    ),
    *_of(
        "privacy",
        "cli/privacy.py",
        (
            "floret privacy takes another delta than the policy's",
            "most, delta = permitted.max_epsilon, permitted.delta",
            "most = permitted.max_epsilon",
            "tests/test_privacy.py::test_the_command_says_what_a_policy_has_left",
        ),
    ),
    *_of(
        "evidence",
        "results/sweep.py",
        (
            "a sweep does not say what its table leaves out of an older one",
            "return sum(runs.recorded(about) not in wanted for about in measured)",
            "return 0",
            "tests/test_experiments.py::test_a_sweep_says_which_combinations_it_leaves_out",
        ),
    ),
    *_of(
        "evidence",
        "results/ranking.py",
        (
            "floret rank gives the whole interval of a pair for its half",
            '{half_interval(differences):.2f}" if',
            '{2 * half_interval(differences):.2f}" if',
            "tests/test_ranking.py::test_the_page",
        ),
    ),
    *_of(
        "figures",
        "cli/report.py",
        (
            "floret report of a sweep shows its first run alone",
            "    found = [directory for directory in runs_at(place) if",
            "    found = [directory for directory in runs_at(place)[:1] if",
            "tests/test_report.py::test_the_folder_of_a_sweep_stands_for_its_runs",
        ),
    ),
    *_of(
        "command line",
        "cli/sweep.py",
        (
            "floret sweep checks with other code than the app's",
            "    check_with_code_of(app, engine)\n",
            "",
            "tests/test_experiments.py::test_another_copy_of_floret_checks_the_runs_that_it_makes",
        ),
    ),
    *_of(
        "aggregation",
        "strategies/feddfpa.py",
        (
            "FedDFPA's heads are judged by the steps of their round",
            'return frozenset({"head"})',
            "return frozenset()",
            "tests/test_aggregation.py::test_a_head_of_feddfpa_is_judged_whatever_the_steps_of_its_round",
        ),
    ),
    *_of(
        "aggregation",
        "strategies/ua_pdfl.py",
        (
            "UA-PDFL's representations are judged like weights",
            "statistics = frozenset({UNIT, AUXILIARY})",
            "statistics: frozenset[str] = frozenset()",
            "tests/test_aggregation.py::test_what_ua_pdfl_says_of_no_sample_may_be_a_hundred_times_the_usual",
        ),
    ),
    *_of(
        "privacy",
        "client_app/client.py",
        (
            "a protected client says that it could not train",
            "hides = self.withholds and not self.trains_examples",
            "hides = False",
            "tests/test_privacy.py::test_a_client_that_is_protected_as_a_whole_never_says_that_it_failed",
        ),
    ),
    *_of(
        "privacy",
        "client_app/client.py",
        (
            "a protected client that could not train keeps what is half trained",
            "        self.load_tensors(own)\n        self.memory = memory\n",
            "        self.memory = memory\n",
            "tests/test_privacy.py::test_a_client_that_is_protected_as_a_whole_never_says_that_it_failed",
        ),
    ),
    *_of(
        "privacy",
        "client_app/client.py",
        (
            "a protected client is measured for nobody",
            "        if self.withholds:\n            return {}\n        splits",
            "        splits",
            "tests/test_privacy.py::test_a_protected_client_measures_nothing",
        ),
    ),
    *_of(
        "models",
        "models/layers.py",
        (
            "a number that is no word id is looked up",
            "ids.where((ids > 0) & (ids < self.num_embeddings), 0)",
            "ids",
            "tests/test_models.py::test_fasttext_takes_the_mean_over_the_words_and_leaves_padding_out",
        ),
    ),
    *_of(
        "privacy",
        "client_app/app.py",
        (
            "a refusal that tells how many examples there are is not noted",
            "        if self.has_own_data and not self.protects:\n            # Also",
            "        if joins and self.has_own_data and not self.protects:\n            # Also",
            "tests/test_privacy.py::test_a_refusal_that_tells_how_many_examples_there_are_is_noted",
        ),
    ),
    *_of(
        "methods",
        "client_app/methods/apple.py",
        (
            "APPLE: core models of an earlier run are mixed in",
            "        if not self.is_of_this_run():\n            of_others",
            "        if not self.memory:\n            of_others",
            "tests/test_fedkd_fedcac_apple.py::test_core_models_of_peers_in_an_earlier_run_are_forgotten",
        ),
    ),
    *_of(
        "methods",
        "client_app/methods/fedala.py",
        (
            "FedALA: the weights of an earlier run are gone on from",
            "known = self.memory if self.is_of_this_run() else {}",
            "known = self.memory",
            "tests/test_fedbabu_lg_fedavg_per_fedavg_fedala.py::test_fedala_learns_its_weights_anew_in_each_run",
        ),
    ),
    *_of(
        "evidence",
        "results/report.py",
        (
            "runs of other files are compared without a word of it",
            'if "dataset" not in found and len(',
            "if not found and len(runs) < 0 and len(",
            "tests/test_report.py::test_a_comparison_tells_of_other_files_and_of_own_data",
        ),
    ),
    *_of(
        "command line",
        "cli/serve.py",
        (
            "labels that a model does not have are counted as wrong",
            "y.max() >= personal.classes",
            "y.max() > personal.classes",
            "tests/test_serving.py::test_labels_that_the_model_does_not_have_are_no_accuracy",
        ),
    ),
    *_of(
        "command line",
        "cli/report.py",
        (
            "a damaged run keeps a folder from being reported",
            "if directories == [place]:",
            "if directories:",
            "tests/test_report.py::test_the_folder_of_a_sweep_stands_for_its_runs",
        ),
    ),
    *_of(
        "server",
        "server_app/setup.py",
        (
            "networks beside a model are not counted before a run",
            "        values += kind.values_beside(",
            "        kind.values_beside(",
            "tests/test_setup.py::test_what_cannot_work_is_one_line",
        ),
    ),
    *_of(
        "replies",
        "strategies/core/update_norms.py",
        (
            "one client alone says what is usual",
            "_LEAST_CLIENTS = 2\n",
            "_LEAST_CLIENTS = 1\n",
            "tests/test_aggregation.py::test_one_client_alone_does_not_say_what_is_usual",
        ),
    ),
    *_of(
        "replies",
        "strategies/core/update_norms.py",
        (
            "refused updates never say what is usual",
            "doubtful = 2 * len(self._refused) > max(len(clients), len(before))",
            "doubtful = False",
            "tests/test_aggregation.py::test_where_most_of_a_round_are_refused_what_is_usual_follows",
        ),
    ),
    *_of(
        "replies",
        "strategies/core/update_norms.py",
        (
            "a refused update says what is usual",
            "doubtful = 2 * len(self._refused) > max(len(clients), len(before))",
            "doubtful = True",
            "tests/test_aggregation.py::test_where_most_of_a_round_are_refused_what_is_usual_follows",
        ),
    ),
    *_of(
        "replies",
        "strategies/core/base.py",
        (
            "a round in which all were refused is forgotten",
            "            self.norms.end_round(changed=False)\n",
            "",
            "tests/test_aggregation.py::test_a_federation_that_was_refused_goes_on",
        ),
    ),
    *_of(
        "policy",
        "client_app/training.py",
        (
            "a class of one sample is drawn to what the server sent",
            "return prototypes, known & ~self.rare()",
            "return prototypes, known",
            "tests/test_policy.py::test_a_target_for_a_class_of_one_sample_tells_nothing_of_it",
        ),
    ),
    *_of(
        "policy",
        "client_app/methods/gpfl.py",
        (
            "a class of one sample is drawn to the server's embedding",
            "self._drawn = ~self.rare()",
            "self._drawn = torch.ones_like(self.rare())",
            "tests/test_policy.py::test_a_target_for_a_class_of_one_sample_tells_nothing_of_it",
        ),
    ),
    *_of(
        "policy",
        "client_app/policy.py",
        (
            "a decay of more than all of the weights is permitted",
            "for key, value in method.decays(config, parameters).items():",
            "for key, value in ():",
            "tests/test_policy.py::test_what_a_policy_refuses_is_one_line",
        ),
    ),
    *_of(
        "training",
        "client_app/client.py",
        (
            "a model that is finite and of no use is kept",
            "        self._check_grown(begun, {} if self.protection else tensors)\n",
            "",
            "tests/test_policy.py::test_a_personal_model_that_is_finite_and_of_no_use_is_not_kept",
        ),
    ),
    *_of(
        "replies",
        "server_app/rounds.py",
        (
            "nodes that come and go in turn hold up a round for ever",
            "while federation.renewing and time.monotonic() < min(started + RENEWAL, deadline):",
            "while federation.renewing:",
            "tests/test_names.py::test_nodes_that_come_and_go_in_turn_hold_up_no_round",
        ),
    ),
    *_of(
        "replies",
        "strategies/fedpac.py",
        (
            "a variance that is made up decides the others' heads",
            "MOST_TIMES = 1e3\n",
            "MOST_TIMES = 1e30\n",
            "tests/test_fedpac_fedgh_gpfl.py::test_a_variance_that_is_made_up_costs_the_others_nothing",
        ),
    ),
    *_of(
        "history",
        "results/history.py",
        (
            "what one node says of its test samples decides the weighted mean",
            "at_most(sizes) if bounded else sizes",
            "sizes",
            "tests/test_history.py::test_what_one_real_node_says_counts_for_a_hundred_times_the_median",
        ),
    ),
    *_of(
        "history",
        "server_app/rounds.py",
        (
            "what real nodes say is not bounded",
            "bounded=not strategy.roster.trusted,",
            "bounded=False,",
            "tests/test_aggregation.py::test_who_declares_a_billion_samples_does_not_count_for_them",
        ),
    ),
    *_of(
        "history",
        "results/history.py",
        (
            "one loss is the loss of a round",
            "at_most(losses, least=1.0) if bounded else losses",
            "losses",
            "tests/test_history.py::test_what_one_real_node_says_counts_for_a_hundred_times_the_median",
        ),
    ),
    *_of(
        "setup",
        "models/split.py",
        (
            "widths are those of a forward pass that is made",
            'device="meta")',
            "device=next(iter(model.parameters())).device)",
            "tests/test_models.py::test_widths_of_inputs_that_no_memory_holds",
        ),
    ),
    *_of(
        "rounds",
        "results/rundir.py",
        (
            "bytes after the checkpoint's rounds block a resume",
            'content = path.read_bytes().split(b"\\n")[:rounds] if path.is_file() else []',
            'content = path.read_text().encode().split(b"\\n")[:rounds] if path.is_file() else []',
            "tests/test_resume.py::test_what_is_no_text_after_the_checkpoint_is_run_again",
        ),
    ),
    *_of(
        "state",
        "common/durable.py",
        (
            "who is told to stop while it writes leaves half a file",
            "except BaseException:  # also if",
            "except OSError:  # also if",
            "tests/test_state.py::test_a_process_that_is_told_to_stop_while_it_writes_leaves_no_new_file",
        ),
    ),
    *_of(
        "engine",
        "cli/main.py",
        (
            "a run without standard streams cannot be made",
            "            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)\n",
            "            pass\n",
            "tests/test_engine.py::test_a_run_whose_streams_are_closed_is_made",
        ),
    ),
    *_of(
        "data",
        "data/images.py",
        (
            "Training/ and Testing/ are classes",
            "if len(named) > 1 and all(map(class_folders, named)):",
            "if False:",
            "tests/test_data_images.py::test_parts_of_other_names_are_not_taken_for_classes",
        ),
    ),
    *_of(
        "data",
        "data/datasets.py",
        (
            "a folder without images is a class",
            "    empty = set(range(len(names))) - {label",
            "    empty = set[int]() - {label",
            "tests/test_data_images.py::test_a_folder_without_images_is_no_class_unless_somebody_says_so",
        ),
    ),
    *_of(
        "data",
        "data/datasets.py",
        (
            "room is asked for after the first image is decoded",
            "        check_size(min(len(y), source.max_samples or len(y)), form)\n",
            "",
            "tests/test_data_images.py::test_images_that_would_not_fit_are_refused_before_the_first_is_decoded",
        ),
    ),
    *_of(
        "data",
        "data/npz.py",
        (
            "bytes that become floats are counted as bytes",
            '    _check_room(f"{where} as {blank.dtype}", shape, blank.dtype)\n',
            "",
            "tests/test_data.py::test_features_are_counted_as_they_will_be_in_memory",
        ),
    ),
    *_of(
        "data",
        "data/clients.py",
        (
            "a node is ready with files that do not fit each other",
            '        check_alike(train, test, (f"{files[0]}", f"{files[1]}"))\n    for',
            "    for",
            "tests/test_data.py::test_a_node_does_not_wait_with_files_that_no_run_could_use",
        ),
    ),
    *_of(
        "data",
        "models/layers.py",
        (
            "parts of a word are words",
            "whole = not x.is_floating_point() or bool((x == x.floor()).all())",
            "whole = True",
            "tests/test_privacy.py::test_a_number_that_is_no_word_id_shows_in_no_protected_run",
        ),
    ),
    *_of(
        "serving",
        "cli/serve.py",
        (
            "the output takes the place of the input",
            "if output and source.expanduser().resolve() == output.expanduser().resolve():",
            "if False:",
            "tests/test_serving.py::test_an_output_that_is_the_input",
        ),
    ),
    *_of(
        "serving",
        "cli/serve.py",
        (
            "a file's name that is no text ends predict",
            '.encode(errors="surrogateescape")',
            ".encode()",
            "tests/test_serving.py::test_images_one_by_one_and_as_a_folder",
        ),
    ),
    *_of(
        "policy",
        "client_app/policy.py",
        (
            "pFedMe's shared model jumps beyond the personal one",
            "if not value <= max(self.max_decay, 2.0):",
            "if not value <= max(self.max_decay, 1e9):",
            "tests/test_policy.py::test_what_a_policy_refuses_is_one_line",
        ),
    ),
    *_of(
        "training",
        "client_app/client.py",
        (
            "what is sent and kept beside the model may be of any size",
            "*self._sizes(others).items()]:",
            "]:",
            "tests/test_policy.py::test_what_is_sent_and_kept_beside_the_model_is_looked_at_too",
        ),
    ),
    *_of(
        "replies",
        "strategies/core/update_norms.py",
        (
            "who is refused alone says what is usual",
            "> max(len(clients), len(before))",
            "> len(clients)",
            "tests/test_aggregation.py::test_a_client_that_is_alone_for_long_does_not_say_what_is_usual",
        ),
    ),
    *_of(
        "replies",
        "strategies/core/update_norms.py",
        (
            "one known client among new ones may be of any size",
            "return max(middle, min(alone, ABSURD * middle) if len(everything) > _LEAST_CLIENTS else alone)",
            "return max(middle, alone)",
            "tests/test_aggregation.py::test_one_client_alone_among_those_that_come_for_the_first_time",
        ),
    ),
    *_of(
        "checkpoint",
        "strategies/core/update_norms.py",
        (
            "a round of which nothing counts takes a place",
            "            if counted:\n                self._rounds",
            "            if True:\n                self._rounds",
            "tests/test_aggregation.py::test_a_round_of_which_nothing_counts_takes_no_place",
        ),
    ),
    *_of(
        "privacy",
        "strategies/core/protection.py",
        (
            "a server whose account is gone counts from zero",
            "        if lacking:\n",
            "        if False:\n",
            "tests/test_privacy.py::test_a_server_whose_account_lacks_rounds_does_not_go_on",
        ),
    ),
    *_of(
        "privacy",
        "client_app/protection.py",
        (
            "the noise of the count is taken for the run's",
            "if r != COUNT and not self._line.by_server",
            "if not self._line.by_server",
            "tests/test_privacy.py::test_more_noise_may_be_demanded_than_the_number_of_examples_gets",
        ),
    ),
    *_of(
        "methods",
        "strategies/fedpa.py",
        (
            "FedPA's generator ignores the decay of what heads say",
            "loss = own.generator_weight * decayed * fidelity",
            "loss = own.generator_weight * fidelity",
            "tests/test_criticalfl_fedpa.py::test_the_training_of_the_generator_by_hand",
        ),
    ),
    *_of(
        "methods",
        "strategies/fedpa.py",
        (
            "FedPA's generator's rate does not decay",
            "rate = own.generator_lr * decayed",
            "rate = own.generator_lr",
            "tests/test_criticalfl_fedpa.py::test_the_training_of_the_generator_by_hand",
        ),
    ),
    *_of(
        "methods",
        "strategies/fedpa.py",
        (
            "FedPA's features are drawn together",
            "loss = loss + own.diversity_weight * diversity_loss(noise, features, labels)",
            "loss = loss - own.diversity_weight * diversity_loss(noise, features, labels)",
            "tests/test_criticalfl_fedpa.py::test_the_training_of_the_generator_by_hand",
        ),
    ),
    *_of(
        "methods",
        "client_app/methods/fedcpd.py",
        (
            "FedCPD's teacher goes through the blocks that are trained",
            "teacher, blocks = self._teacher, copy.deepcopy(self._blocks).requires_grad_(False)",
            "teacher, blocks = self._teacher, self._blocks",
            "tests/test_losses.py::test_fedcpd",
        ),
    ),
    *_of(
        "methods",
        "client_app/methods/ua_pdfl.py",
        (
            "UA-PDFL's probability of nothing is sent as minus infinity",
            "log_softmax(1)[0].clamp_min(math.log(LEAST))",
            "log_softmax(1)[0]",
            "tests/test_keys.py::test_ua_pdfl_asks_the_same_peers_whatever_the_wire",
        ),
    ),
    *_of(
        "methods",
        "client_app/methods/ua_pdfl.py",
        (
            "UA-PDFL's small probabilities are lost on the wire",
            "return unit.double().softmax(0)",
            "return unit.double().exp().half().double()",
            "tests/test_keys.py::test_ua_pdfl_asks_the_same_peers_whatever_the_wire",
        ),
    ),
    *_of(
        "rounds",
        "common/flower.py",
        (
            "a round is finished though the run was stopped",
            "if _STOPPED.is_set():",
            "if False:",
            "tests/test_exchange.py::test_a_round_is_not_finished_when_the_run_was_stopped",
        ),
    ),
    *_of(
        "rounds",
        "common/flower.py",
        (
            "a lost actor is the fault of a client",
            "reply.error.code == ErrorCode.UNKNOWN:",
            "reply.error.code == ErrorCode.INVALID_FAB:",
            "tests/test_exchange.py::test_a_lost_actor_is_no_fault_of_a_client",
        ),
    ),
    *_of(
        "command line",
        "server_app/setup.py",
        (
            "floret run does not look at what it resumes",
            "    check_resumable(run, values)\n    check_rounds_left(run, config.rounds, Checkpoints(",
            "    check_rounds_left(run, config.rounds, Checkpoints(",
            "tests/test_setup.py::test_where_a_simulation_writes_and_what_it_resumes_are_looked_at_before_it_starts",
        ),
    ),
    *_of(
        "command line",
        "common/config.py",
        (
            "a name in other letters is not found",
            "difflib.get_close_matches(name.casefold(), known, n=1",
            "difflib.get_close_matches(name, known, n=1",
            "tests/test_experiments.py::test_only_some_runs",
        ),
    ),
    *_of(
        "nodes",
        "client_app/node/transport.py",
        (
            "a key that is not registered is told in five lines",
            'in (error.details() or "") else TURNED_AWAY\n                return False',
            'in (error.details() or "") else TURNED_AWAY\n                return True',
            "tests/test_nodes.py::test_keys_that_the_superlink_does_not_know",
        ),
    ),
    *_of(
        "figures",
        "results/report.py",
        (
            "of runs over other data one is shown as the best",
            '"best": None if apart else max(means, default=None),',
            '"best": max(means, default=None),',
            "tests/test_report.py::test_a_comparison_tells_of_other_files_and_of_own_data",
        ),
    ),
    *_of(
        "evidence",
        "results/experiment.py",
        (
            "a claim is held though columns of it were not run",
            "bool(self.unfinished or self.unmeasured)",
            "bool(self.unfinished)",
            "tests/test_evidence.py::test_a_claim_is_held_so_far_until_every_rival_was_run",
        ),
    ),
    *_of(
        "evidence",
        "results/experiment.py",
        (
            "a rival that was run with other seeds alone decides",
            "if cells[row].keys() & each.keys()",
            "if cells[row]",
            "tests/test_experiments.py::test_a_claim_of_which_seeds_differ_is_named",
        ),
    ),
    *_of(
        "evidence",
        "results/evidence.py",
        (
            "what is mixed at one scale and undecided at another is undecided",
            "UNDECIDED in outcomes and not outcomes & {MIXED, NOT_HELD}",
            "UNDECIDED in outcomes and not outcomes & {NOT_HELD}",
            "tests/test_evidence.py::test_a_claim_that_holds_at_one_scale_alone_is_mixed",
        ),
    ),
    *_of(
        "verify",
        "results/verify.py",
        (
            "bytes of a run made again are not compared",
            '("bytes up", old.bytes.up, sent.up), ("bytes down", old.bytes.down, sent.down)',
            '("bytes down", old.bytes.down, sent.down)',
            "tests/test_verify.py::test_a_run_made_again_agrees_or_says_why",
        ),
    ),
    *_of(
        "verify",
        "results/verify.py",
        (
            "a file of results says where a run made again is",
            "**without_places(config)",
            "**config",
            "tests/test_verify.py::test_the_data_of_a_run",
        ),
    ),
    *_of(
        "verify",
        "cli/verify.py",
        (
            "control codes of a file reach the terminal",
            "map(printable, str(comparison).splitlines())",
            "str(comparison).splitlines()",
            "tests/test_verify.py::test_a_run_made_again_agrees_or_says_why",
        ),
    ),
    *_of(
        "evidence",
        "results/measured.py",
        (
            "an accuracy of a file may be anything",
            "is_number(value) and 0 <= value <= 1",
            "is_number(value)",
            "tests/test_experiments.py::test_what_no_command_writes_into_results_is_a_line",
        ),
    ),
    *_of(
        "evidence",
        "results/history.py",
        (
            "NaN is a number of a file",
            "not isinstance(value, bool) and abs(value) < _LARGEST\n",
            "not isinstance(value, bool)\n",
            "tests/test_experiments.py::test_what_no_command_writes_into_results_is_a_line",
        ),
    ),
    *_of(
        "evidence",
        "results/runs.py",
        (
            "a damaged record of a run ends the command",
            "            check_about(about)\n",
            "",
            "tests/test_experiments.py::test_a_damaged_run_of_a_sweep_leaves_the_others",
        ),
    ),
    *_of(
        "evidence",
        "results/fit.py",
        (
            "a trial that the file has is there twice",
            "if trial and all(trial.key != other.key for other in trials):",
            "if trial:",
            "tests/test_experiments.py::test_a_trial_that_the_file_of_a_fit_has_is_not_there_twice",
        ),
    ),
    *_of(
        "evidence",
        "results/fit.py",
        (
            "the difference of a row is that of all rows",
            "if r == row]",
            "]",
            "tests/test_experiments.py::test_a_setting_has_the_mean_difference_of_each_row",
        ),
    ),
    *_of(
        "evidence",
        "results/sweep.py",
        (
            "a sweep is decided by validation before training",
            'last.accuracy("after", "validation").mean',
            'last.accuracy("before", "validation").mean',
            "tests/test_experiments.py::test_a_sweep_is_decided_by_validation_after_training",
        ),
    ),
    *_of(
        "evidence",
        "results/experiment.py",
        (
            "rounds of a scaled run are cut off",
            'round(keys["rounds"] * scale)',
            'int(keys["rounds"] * scale)',
            "tests/test_experiments.py::test_the_runs_of_a_table",
        ),
    ),
    *_of(
        "evidence",
        "results/experiment.py",
        (
            "the rounds that are averaged are cut off",
            "round(self.measure.last_rounds * scale)",
            "int(self.measure.last_rounds * scale)",
            "tests/test_experiments.py::test_what_a_run_says",
        ),
    ),
    *_of(
        "evidence",
        "results/experiment.py",
        (
            "a rival without a printed number makes a claim unfinished",
            "[row for row in claim.than if reported[row][column]]",
            "list(claim.than)",
            "tests/test_experiments.py::test_a_claim_is_judged_column_by_column",
        ),
    ),
    *_of(
        "evidence",
        "results/measured.py",
        (
            "the spread over clients is that of the first round",
            "std=spreads[-1].std",
            "std=spreads[0].std",
            "tests/test_experiments.py::test_a_run_read_in_every_way",
        ),
    ),
    *_of(
        "evidence",
        "results/ranking.py",
        (
            "who sends a thousandth more has a worse place",
            "other < own * (1 - 1e-3)",
            "other < own",
            "tests/test_ranking.py::test_who_sends_a_thousandth_more_has_the_same_place",
        ),
    ),
    *_of(
        "evidence",
        "results/ranking.py",
        (
            "a ranking takes NaN",
            "if not all(value is None or is_number(value) for value in values):",
            "if False:",
            "tests/test_ranking.py::test_what_is_no_sweep_over_methods_is_refused_in_a_line",
        ),
    ),
    *_of(
        "evidence",
        "results/runs.py",
        (
            "a key of real nodes alone makes another run of a simulation",
            '_REAL_NODES = ("return-timeout",)',
            "_REAL_NODES = ()",
            "tests/test_experiments.py::test_a_run_is_the_same_wherever_its_data_are",
        ),
    ),
    *_of(
        "history",
        "results/history.py",
        (
            "the worst decile is of fewer clients",
            "math.ceil(len(values) / 10)",
            "max(1, len(values) // 10)",
            "tests/test_formulas.py",
        ),
    ),
    *_of(
        "history",
        "results/history.py",
        (
            "what travelled to refused clients is not counted",
            "client.bytes for client in clients.values()), *others]",
            "client.bytes for client in clients.values())]",
            "tests/test_history.py",
        ),
    ),
    *_of(
        "data",
        "data/clients.py",
        (
            "the test part is what comes first",
            'own = own[numpy_generator(config.seed_of_data, "split", str(partition_id)).permutation(n)]',
            "own = own[:]",
            "tests/test_data.py::test_each_split_is_a_random_choice_of_a_clients_samples",
        ),
    ),
    *_of(
        "data",
        "data/clients.py",
        (
            "the test part does not depend on the seed",
            'own = own[numpy_generator(config.seed_of_data, "split"',
            'own = own[numpy_generator(0, "split"',
            "tests/test_data.py::test_each_split_is_a_random_choice_of_a_clients_samples",
        ),
    ),
    *_of(
        "data",
        "data/clients.py",
        (
            "data-seed does not cut a client's own file",
            "config.validation_fraction, config.seed_of_data, name",
            "config.validation_fraction, config.seed, name",
            "tests/test_data.py::test_data_seed_cuts_a_clients_own_training_file",
        ),
    ),
    *_of(
        "data",
        "data/clients.py",
        (
            "a class that only a test file has is not counted",
            "for y in (*train, *(read_labels(path) for _, path in files))",
            "for y in train",
            "tests/test_data.py::test_a_class_that_only_a_test_file_has_is_counted",
        ),
    ),
    *_of(
        "data",
        "data/datasets.py",
        (
            "a cut pool has classes without samples",
            "min(classes, samples), samples)",
            "classes, samples)",
            "tests/test_data.py::test_a_pool_that_is_cut_has_no_more_classes_than_samples",
        ),
    ),
    *_of(
        "data",
        "data/partition.py",
        (
            "as many shards as samples are refused",
            "shards > samples:",
            "shards >= samples:",
            "tests/test_data.py::test_what_the_library_refuses_is_one_line_of_data_error",
        ),
    ),
    *_of(
        "data",
        "data/partition.py",
        (
            "the client that is named is not the smallest",
            "at_least = needed if attempt + 1 < draws else 0",
            "at_least = needed",
            "tests/test_data.py::test_min_samples_that_no_draw_can_meet",
        ),
    ),
    *_of(
        "experiments",
        "results/runs.py",
        (
            "a run of a file of results needs no dataset",
            'for key in ("method", "dataset")',
            'for key in ("method",)',
            "tests/test_verify.py::test_a_run_without_a_dataset_is_told",
        ),
    ),
    *_of(
        "server",
        "server_app/federation.py",
        (
            "a start fails at its deadline though enough are there",
            " or now > deadline:",
            ":",
            "tests/test_names.py::test_a_start_does_not_wait_for_a_node_that_does_not_answer",
        ),
    ),
    *_of(
        "server",
        "server_app/federation.py",
        (
            "a start waits for who does not answer",
            " or now - enough > _GRACE or",
            " or",
            "tests/test_names.py::test_a_start_does_not_wait_for_a_node_that_does_not_answer",
        ),
    ),
    *_of(
        "server",
        "server_app/federation.py",
        (
            "a run that goes on takes clients of another division of the data",
            'self._partitions = about.get("num-partitions", 0)',
            "pass",
            "tests/test_names.py::test_a_run_that_goes_on_keeps_its_number_of_parts",
        ),
    ),
    *_of(
        "server",
        "common/names.py",
        (
            "names with the same numbers tie",
            "    return key, name\n",
            '    return key, ""\n',
            "tests/test_formulas.py::test_names_are_ordered_by_the_numbers_in_them",
        ),
    ),
    *_of(
        "config",
        "cli/run.py",
        (
            "the spelling of an option decides which is the last",
            "            found.append(argument)\n",
            "            found.insert(0, argument)\n",
            "tests/test_config.py::test_the_clients_of_a_simulation",
        ),
    ),
    *_of(
        "config",
        "common/config.py",
        (
            "a batch size has no bound",
            "batch_size: int = between(1, 1e9)",
            "batch_size: int = between(1)",
            "tests/test_config.py",
        ),
    ),
    *_of(
        "config",
        "common/home.py",
        (
            "an empty FLORET_HOME is the working directory",
            'os.environ.get("FLORET_HOME") or "~/.floret"',
            'os.environ.get("FLORET_HOME", "~/.floret")',
            "tests/test_config.py::test_the_folder_that_keeps_files_is_absolute",
        ),
    ),
    *_of(
        "config",
        "cli/main.py",
        (
            "who may not read is told to name a place to write to",
            "            if denied:\n",
            "            if not denied:\n",
            "tests/test_config.py::test_a_place_of_another_users_is_told",
        ),
    ),
    *_of(
        "serving",
        "client_app/serving.py",
        (
            "a state without a parameter blames the run config",
            "        except ConfigError as error:\n",
            "        except KeyError as error:\n",
            "tests/test_serving.py::test_a_state_from_before_a_parameter_existed_says_so",
        ),
    ),
    *_of(
        "state command",
        "client_app/inventory.py",
        (
            "a folder is emptied although it has got a version",
            '            if not any(folder.glob("*.json")):\n',
            "            if True:\n",
            "tests/test_state_command.py::test_a_folder_that_gets_a_version_meanwhile_is_in_use",
        ),
    ),
    *_of(
        "state command",
        "client_app/inventory.py",
        (
            "what cannot be removed is a traceback",
            "                _remove_folder(shelf.store)\n            except OSError",
            "                _remove_folder(shelf.store)\n            except KeyError",
            "tests/test_state_command.py::test_what_cannot_be_removed_is_told_and_what_is_not_florets_stays",
        ),
    ),
    *_of(
        "certificates",
        "cli/certificates.py",
        (
            "an expired CA issues",
            "if ca_certificate.not_valid_after_utc <= datetime.now(UTC):",
            "if False:",
            "tests/test_certificates.py::test_nothing_is_issued_by_a_ca_that_has_expired",
        ),
    ),
    *_of(
        "certificates",
        "cli/certificates.py",
        (
            "a certificate outlives its CA",
            "min(datetime.now(UTC) + timedelta(days=days), ca.not_valid_after_utc)",
            "datetime.now(UTC) + timedelta(days=days)",
            "tests/test_certificates.py::test_the_superlinks_certificate_is_valid_no_longer_than_its_ca",
        ),
    ),
    *_of(
        "certificates",
        "cli/certificates.py",
        (
            "a full disk leaves an empty key",
            "        path.unlink(missing_ok=True)\n",
            "",
            "tests/test_certificates.py::test_a_full_disk_leaves_no_part_of_a_key",
        ),
    ),
    *_of(
        "names",
        "common/proof.py",
        (
            "a proof may be as long as it likes",
            " or max(len(key), len(signature)) > _LONGEST:",
            ":",
            "tests/test_names.py::test_nothing_is_computed_with_a_proof_that_is_too_long",
        ),
    ),
    *_of(
        "wire",
        "common/wire.py",
        (
            "a mask may have bytes beyond its bits",
            " or (packing == BITS and len(array.data) != bits):",
            ":",
            "tests/test_replies.py::test_a_mask_has_no_bytes_beyond_its_bits",
        ),
    ),
    *_of(
        "wire",
        "common/tensors.py",
        (
            "free sides of different peers must be equal",
            '(match[1] if match else "", side.name)',
            '("", side.name)',
            "tests/test_replies.py::test_free_sides_of_different_peers_need_not_be_equal",
        ),
    ),
    *_of(
        "checkpoint",
        "server_app/checkpoint.py",
        (
            "files of mail pile up",
            "if taken > _LOOSE * sum(place.size for place in places.values()):",
            "if False:",
            "tests/test_resume.py::test_files_of_mail_do_not_pile_up",
        ),
    ),
    *_of(
        "checkpoint",
        "server_app/checkpoint.py",
        (
            "what an unreadable manifest names is removed",
            "                return  # which files it needs",
            "                continue  # which files it needs",
            "tests/test_resume.py::test_what_a_manifest_names_that_cannot_be_read_now_stays",
        ),
    ),
    *_of(
        "checkpoint",
        "server_app/checkpoint.py",
        (
            "a client that tells what there is not is taken",
            " or client.accuracies not in TELLING:",
            ":",
            "tests/test_resume.py::test_a_checkpoint_with_a_right_checksum_that_is_none_is_passed_over",
        ),
    ),
    *_of(
        "checkpoint",
        "server_app/checkpoint.py",
        (
            "a manifest names files by a path",
            "if Path(file.name).name != file.name:",
            "if False:",
            "tests/test_resume.py::test_a_checkpoint_with_a_right_checksum_that_is_none_is_passed_over",
        ),
    ),
    *_of(
        "engine",
        "engine/grid.py",
        (
            "a worker forgets what its batch needs",
            "max(_SHARED, len(used))",
            "_SHARED",
            "tests/test_engine.py::test_a_batch_forgets_nothing_that_it_needs",
        ),
    ),
    *_of(
        "engine",
        "engine/grid.py",
        (
            "what was not begun counts as an attempt",
            "begun = place == 0 and not worker.killed",
            "begun = place == 0",
            "tests/test_engine.py::test_what_a_worker_that_took_too_long_had_not_begun_counts_as_no_attempt",
        ),
    ),
    *_of(
        "engine",
        "engine/grid.py",
        (
            "messages out of time stay",
            "while self._queue and self._open[self._queue[0]].deadline <= now:",
            "while False:",
            "tests/test_engine.py::test_messages_that_are_out_of_time_are_forgotten",
        ),
    ),
    *_of(
        "policy",
        "client_app/audit.py",
        (
            "a clock that was set back begins the day anew when it is right",
            '{"day": max(day, last),',
            '{"day": day,',
            "tests/test_policy.py::test_rounds_of_a_day",
        ),
    ),
    *_of(
        "policy",
        "client_app/app.py",
        (
            "a file is named by the folder above it",
            "key=len, reverse=True)",
            "key=len)",
            "tests/test_policy.py::test_no_text_for_the_server_says_where_the_nodes_folders_are",
        ),
    ),
    *_of(
        "state",
        "client_app/state.py",
        (
            "a version has a checkpoint of a round to come",
            "checkpointed=min(at.checkpointed, server_round),",
            "checkpointed=at.checkpointed,",
            "tests/test_state.py::test_a_server_cannot_have_a_checkpoint_of_a_round_that_is_to_come",
        ),
    ),
    *_of(
        "state",
        "client_app/state.py",
        (
            "a round that is sent again keeps its first outcome",
            "min(at.checkpointed, server_round - 1)",
            "at.checkpointed",
            "tests/test_state.py::test_a_server_cannot_have_a_checkpoint_of_a_round_that_is_to_come",
        ),
    ),
    *_of(
        "state",
        "client_app/state.py",
        (
            "rights are taken through a link",
            " and not path.is_symlink():",
            ":",
            "tests/test_state.py::test_nobody_else_can_read_a_state",
        ),
    ),
    *_of(
        "state",
        "client_app/keeping.py",
        (
            "a later line with as many rounds displaces the first",
            "for version in lines[line]), -line))",
            "for version in lines[line]), line))",
            "tests/test_state.py::test_of_lines_with_as_many_rounds_the_first_stays",
        ),
    ),
    *_of(
        "state",
        "client_app/keeping.py",
        (
            "what is needed counts twice in the quota",
            "room -= size[last[line]] if last[line] not in stay else 0",
            "room -= size[last[line]]",
            "tests/test_state.py::test_what_the_run_needs_itself_counts_once_in_the_quota",
        ),
    ),
    *_of(
        "nodes",
        "client_app/node/transport.py",
        (
            "another API of the SuperLink is not told",
            "                self.code = WRONG_API\n                return False\n",
            "                pass\n                return False\n",
            "tests/test_supernode.py::test_another_api_of_the_superlink_is_told",
        ),
    ),
    *_of(
        "report",
        "results/text.py",
        (
            "a cut joins a key to another key's value",
            "return f\"{name[: length - 1].rpartition(', ')[0]}, …\"",
            "return short(name, length)",
            "tests/test_report.py::test_names_that_a_cut_would_make_the_same_are_not_cut",
        ),
    ),
    *_of(
        "policy",
        "client_app/client.py",
        (
            "tensors near zero can be sent nothing",
            "ABSURD * max(own[own_group], 1e-3)",
            "ABSURD * own[own_group]",
            "tests/test_policy.py::test_tensors_that_begin_near_zero_may_grow_a_little",
        ),
    ),
    *_of(
        "policy",
        "client_app/client.py",
        (
            "tensors near zero may not grow",
            "GROWN * max(begun[group], 1e-2)",
            "GROWN * begun[group]",
            "tests/test_policy.py::test_tensors_that_begin_near_zero_may_grow_a_little",
        ),
    ),
    *_of(
        "nodes",
        "client_app/node/supervisor.py",
        (
            "a node that was in the federation does not wait as long again",
            "if time.monotonic() - self._joined > _AT_ONCE:",
            "if False:",
            "tests/test_nodes.py::test_a_node_waits_as_long_again_after_it_has_been_in_the_federation",
        ),
    ),
    *_of(
        "policy",
        "client_app/methods/gpfl.py",
        (
            "GPFL's angle draws a class of one sample, and trains its embedding",
            "self._embeddings(), self._drawn, 1.0)",
            "self._embeddings(), torch.ones_like(self._drawn), 1.0)",
            "tests/test_policy.py::test_an_embedding_of_a_class_of_one_sample_is_not_trained",
        ),
    ),
    *_of(
        "policy",
        "client_app/policy.py",
        (
            "what a run sends is read with another model than its own",
            "declared(config, parameters, (64,) if",
            'declared(replace(config, model="cnn2"), parameters, (64,) if',
            "tests/test_policy.py::test_the_command_reads_a_run_with_its_own_model",
        ),
    ),
    *_of(
        "evidence",
        "cli/run.py",
        (
            "with --format default nobody says whether a run failed",
            'values_of("--format", rest)[-1:] != ["json"]',
            'not values_of("--format", rest)',
            "tests/test_config.py::test_with_its_log_a_run_says_whether_it_failed_unless_it_prints_json",
        ),
    ),
    *_of(
        "evidence",
        "results/runs.py",
        (
            "the order of a federation config makes another run",
            "for key in sorted(keys.keys() - first.keys() - {*_SHARED})",
            "for key in keys if key not in first and key not in _SHARED",
            "tests/test_experiments.py::test_a_federation_config_in_another_order_is_that_of_the_same_run",
        ),
    ),
    *_of(
        "evidence",
        "cli/table_options.py",
        (
            "a federation config of a table drops the one CPU of each client",
            '{"client-resources-num-cpus": "1", **parse_federation_configs(self.federation_configs)}',
            "{**parse_federation_configs(self.federation_configs)}",
            "tests/test_experiments.py::test_clients_of_a_table_have_one_cpu_unless_it_is_said",
        ),
    ),
    *_of(
        "privacy",
        "client_app/training.py",
        (
            "nothing is done after a protected step",
            "                    optimizer.step()\n                    if phase.after_step:\n"
            "                        phase.after_step()\n                total",
            "                    optimizer.step()\n                total",
            "tests/test_privacy.py::test_a_phase_does_something_after_each_protected_step_too",
        ),
    ),
    *_of(
        "policy",
        "client_app/training.py",
        (
            "a node trains on a last batch of two samples",
            "        return 1 if covered else self.setting.min_batch_size",
            "        return 1",
            "tests/test_policy.py::test_no_step_is_of_a_few_samples",
        ),
    ),
    *_of(
        "policy",
        "client_app/methods/fedala.py",
        (
            "FedALA mixes by one sample",
            "max(self.fewest, round(",
            "max(1, round(",
            "tests/test_policy.py::test_no_step_is_of_a_few_samples",
        ),
    ),
    *_of(
        "policy",
        "client_app/policy.py",
        (
            "a batch size below the node's is permitted",
            "if config.batch_size < min(self.min_batch_size, samples):",
            "if False:",
            "tests/test_policy.py::test_a_server_cannot_choose_one_sample",
        ),
    ),
    *_of(
        "policy",
        "client_app/training.py",
        (
            "a node's order is the same in every run",
            'self.message.get("session.lineage", ""), self.config.batch_size,',
            "self.config.batch_size,",
            "tests/test_policy.py::test_samples_are_divided_anew_where_they_are_divided_in_another_way",
        ),
    ),
    *_of(
        "policy",
        "client_app/training.py",
        (
            "a node's order is the same whatever the keys of the method",
            "self.config.batch_size, repr(self.setting.parameters))",
            "self.config.batch_size)",
            "tests/test_policy.py::test_samples_are_divided_anew_where_they_are_divided_in_another_way",
        ),
    ),
    *_of(
        "policy",
        "client_app/methods/feddfpa.py",
        (
            "a fused head tells an accuracy of one sample",
            "count >= max(1, self.setting.hidden_below)",
            "count >= 1",
            "tests/test_policy.py::test_a_fused_head_tells_no_accuracy_that_the_node_does_not_tell",
        ),
    ),
    *_of(
        "policy",
        "client_app/methods/feddfpa.py",
        (
            "a fused head tells accuracies that are not told",
            "return accuracy, measured & (self.setting.accuracies != NONE)",
            "return accuracy, measured",
            "tests/test_policy.py::test_a_fused_head_tells_no_accuracy_that_the_node_does_not_tell",
        ),
    ),
    *_of(
        "state",
        "client_app/keeping.py",
        (
            "of a short run nothing stays",
            "tuple(1 << power for power in range(13))",
            "(16, 64, 256)",
            "tests/test_state.py::test_a_short_run_that_goes_on_with_made_up_rounds_loses_half_of_its_rounds_at_most",
        ),
    ),
    *_of(
        "delivery",
        "common/flower.py",
        (
            "one answer that the SuperLink fails at ends the run",
            "if error.code() in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL):",
            "if error.code() == grpc.StatusCode.ABORTED:",
            "tests/test_replies.py::test_an_answer_that_the_superlink_fails_at_is_refused_and_ends_no_run",
        ),
    ),
    *_of(
        "delivery",
        "common/flower.py",
        (
            "an answer that the SuperLink fails at is waited for, for ever",
            "if time.monotonic() - since >= _FAILS_FOR:",
            "if False:",
            "tests/test_replies.py::test_an_answer_that_the_superlink_fails_at_is_refused_and_ends_no_run",
        ),
    ),
    *_of(
        "replies",
        "strategies/core/base.py",
        (
            "declared samples explain any update",
            "        if not more > 1:\n            return payload.tensors\n        beside",
            "        if True:\n            return payload.tensors\n        beside",
            "tests/test_aggregation.py::test_one_message_of_who_declares_a_billion_samples_ruins_no_run",
        ),
    ),
    *_of(
        "replies",
        "common/bounds.py",
        (
            "a loss counts for any number below zero",
            "max(-bound, min(value, bound))",
            "min(value, bound)",
            "tests/test_history.py::test_what_one_real_node_says_counts_for_a_hundred_times_the_median",
        ),
    ),
    *_of(
        "delivery",
        "client_app/node/transport.py",
        (
            "a node asks its own machine through a proxy",
            "[*_sizes(GRPC_MAX_MESSAGE_LENGTH), DIRECT]",
            "_sizes(GRPC_MAX_MESSAGE_LENGTH)",
            "tests/test_proxy.py",
        ),
    ),
    *_of(
        "delivery",
        "common/proxy.py",
        (
            "the address is tried without the proxy",
            "return proxy.connect(host, port, seconds) if proxy else socket",
            "return proxy.connect(host, port, seconds) if proxy and not host else socket",
            "tests/test_proxy.py",
        ),
    ),
    *_of(
        "delivery",
        "common/proxy.py",
        (
            "exceptions are whole names",
            "return host.lower().endswith(entry.lower())",
            "return host.lower() == entry.lower()",
            "tests/test_proxy.py",
        ),
    ),
    *_of(
        "delivery",
        "common/proxy.py",
        (
            "a proxy's password is not decoded",
            "unquote(self.url.password or '')",
            "self.url.password or ''",
            "tests/test_proxy.py",
        ),
    ),
    *_of(
        "delivery",
        "common/proxy.py",
        (
            "gRPC's own exceptions come last",
            'EXCEPTIONS = ("no_grpc_proxy", "no_proxy")',
            'EXCEPTIONS = ("no_proxy", "no_grpc_proxy")',
            "tests/test_proxy.py",
        ),
    ),
    *_of(
        "history",
        "server_app/rounds.py",
        (
            "a round ends before its checkpoint",
            "        trackers.round(line)\n        left",
            "        trackers.round(line)\n        started = time.perf_counter()\n        left",
            "tests/test_resume.py",
        ),
    ),
    *_of(
        "policy",
        "common/run_config.py",
        (
            "an installed Floret looks for a checkout",
            'folder if (folder / "pyproject.toml").exists() else folder.parent',
            "folder.parent",
            "tests/test_wheel.py",
        ),
    ),
    *_of(
        "experiments",
        "results/evidence.py",
        (
            "a claim that one scale refutes is undecided where another leaves it open",
            "NOT_HELD in outcomes and outcomes <= {NOT_HELD, UNDECIDED} for",
            "outcomes == {NOT_HELD} for",
            "tests/test_evidence.py",
        ),
    ),
    *_of(
        "experiments",
        "results/conditions.py",
        (
            "a new method that git does not know runs as a clean commit",
            '    if not changes and not any(name.partition("/")[0] in _LOADED for name in names):\n',
            "    if not changes:\n",
            "tests/test_experiments.py",
        ),
    ),
    *_of(
        "experiments",
        "results/engines.py",
        (
            "a process that takes another's place names the commit of the first",
            "            self._commit = commit(self._app)\n",
            "            self._commit = self._commit or commit(self._app)\n",
            "tests/test_experiments.py",
        ),
    ),
    *_of(
        "data",
        "data/datasets.py",
        (
            "labels with a gap are not told",
            "            absent = absent_labels(y, num_classes)",
            "            absent = ()",
            "tests/test_setup.py::test_labels_that_do_not_begin_at_0_are_told",
        ),
    ),
    *_of(
        "data",
        "data/clients.py",
        (
            "labels of test files alone are not told",
            "        absent = () if config.num_classes or names else absent_labels(trained, num_classes)",
            "        absent: tuple[int, ...] = ()",
            "tests/test_setup.py::test_a_label_that_only_test_files_have_is_told",
        ),
    ),
    *_of(
        "data",
        "server_app/setup.py",
        (
            "one class is taken",
            "    if num_classes < 2:",
            "    if num_classes < 1:",
            "tests/test_setup.py::test_one_class_is_none_to_learn",
        ),
    ),
    *_of(
        "data",
        "data/clients.py",
        (
            "a node does not look at the headers of its images",
            "        check_images(find_images(part, [class_name(folder) for folder in class_folders(part)]).files)",
            "        find_images(part, [class_name(folder) for folder in class_folders(part)])",
            "tests/test_data_images.py::test_a_node_does_not_wait_with_an_image_that_no_run_could_use",
        ),
    ),
    *_of(
        "results",
        "results/jobs.py",
        (
            "what hinders every run is said once for each",
            "        raise FloretError(reason)\n",
            "        pass\n",
            "tests/test_experiments.py::test_what_hinders_every_run_is_said_once",
        ),
    ),
    *_of(
        "config",
        "common/run_config.py",
        (
            "a run config that cannot be read: the pair is not named",
            "cannot be read ({wrong or error})",
            "cannot be read ({error})",
            "tests/test_config.py::test_the_pair_that_cannot_be_read_is_named",
        ),
    ),
    *_of(
        "config",
        "common/config.py",
        (
            "a key without its method's name is not looked for",
            'hint = _in_tables(key, str(values.get("method", "")), known) or nearest',
            "hint = nearest",
            "tests/test_config.py::test_a_key_without_its_methods_name_is_found",
        ),
    ),
    *_of(
        "results",
        "results/curve.py",
        (
            "curve: a mean over rounds is of some of the seeds",
            "if len(each) < len(seeds)]:",
            "if len(each) < 1]:",
            "tests/test_curve.py::test_accuracy_over_rounds_is_of_those_that_all_seeds_have",
        ),
    ),
    *_of(
        "results",
        "results/curve.py",
        (
            "curve: before local training is drawn as after",
            "        return MEASURES[self.when]",
            '        return MEASURES["after"]',
            "tests/test_curve.py::test_accuracy_over_rounds_is_of_those_that_all_seeds_have",
        ),
    ),
    *_of(
        "privacy",
        "server_app/setup.py",
        (
            "a budget below one round is not refused",
            "        check_first_round(config)\n",
            "        pass\n",
            "tests/test_privacy.py::test_a_budget_that_is_less_than_a_round_is_refused_before_the_first",
        ),
    ),
    *_of(
        "data",
        "data/inputs.py",
        (
            "an image in colour is answered by a model of grey ones",
            "    channels = 0 if shape[0] == 1 and not config.image_channels else shape[0]",
            "    channels = shape[0]",
            "tests/test_data_images.py::test_a_model_of_grey_images_answers_no_image_in_colour_unless_the_run_converted_them",
        ),
    ),
]


def copy_of_checkout(folder: Path) -> Path:
    """Copy what git would commit to ``folder``, and commit it there: a run notes its commit."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    who = ("-c", "user.name=tests", "-c", "user.email=tests@localhost")
    for command in (["init", "-q"], ["add", "-A"], [*who, "commit", "-q", "-m", "A copy"]):
        subprocess.run(["git", *command], cwd=folder, check=True)
    return folder


def environment(copy: Path) -> dict[str, str]:
    """Return the environment in which the copy's code is imported, and no bytecode of it is kept."""
    return os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}


def check_imports(copy: Path) -> None:
    """Check that the copy is what Python imports: another checkout may be installed.

    Raises:
        SystemExit: it is not.
    """
    names = ", ".join(PACKAGES)
    script = f"import sys; sys.path.pop(0); import {names}; print(*(module.__file__ for module in ({names})))"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=copy, env=environment(copy), capture_output=True, text=True, check=True
    )
    wrong = [file for file in done.stdout.split() if not Path(file).resolve().is_relative_to(copy.resolve())]
    if wrong or not done.stdout:
        raise SystemExit(f"the copy in {copy} is not what is imported: {wrong or done.stderr}")


def first_failure(copy: Path, arguments: Sequence[str], tier: str) -> str:
    """Run pytest in the copy; return the first test of the tier that fails, or an empty text.

    Raises:
        SystemExit: pytest did not run, or knows no such test.
    """
    command = [sys.executable, "-m", "pytest", "-m", tier, *arguments, "-x", "-q", "-p", "no:cacheprovider"]
    try:
        done = subprocess.run(
            command, cwd=copy, env=environment(copy), capture_output=True, text=True, timeout=PATIENCE
        )
    except subprocess.TimeoutExpired:
        return f"no end within {PATIENCE:g} s"
    if done.returncode in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
        return ""
    found = re.search(r"^(?:FAILED|ERROR) (\S+::.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    if done.returncode != 1 and not found:
        raise SystemExit(f"{' '.join(command)}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return found[1] if found else "a test without a name"


def tried(copy: Path, defect: Defect, calls: Sequence[Sequence[str]]) -> tuple[str, float]:
    """Put a defect into the copy, look for it, and take it out again; return the table's words and the seconds.

    Raises:
        SystemExit: the text that it replaces is not there exactly once.
    """
    path = copy / defect.file
    before = path.read_text(encoding="utf-8")
    if before.count(defect.text) != 1:
        raise SystemExit(f"{defect.name}: {defect.file} has the text {before.count(defect.text)} times, not once")
    started = time.monotonic()
    path.write_text(before.replace(defect.text, defect.by), encoding="utf-8")
    try:
        compile(path.read_text(encoding="utf-8"), defect.file, "exec")
        tries = ((f"`{first_failure(copy, call, tier)}`", mark) for tier, mark in TIERS.items() for call in calls)
        found = next((name + mark for name, mark in tries if name != "``"), "NOT FOUND")
    finally:
        path.write_text(before, encoding="utf-8")
    return found, time.monotonic() - started


def main() -> None:
    """Try the defects and print the table.

    Raises:
        SystemExit: the unmodified copy fails, or there is nothing to do.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tests", default="", help="arguments of pytest, in one text; empty: the likely tests alone")
    parser.add_argument("--only", action="append", default=[], help="defects whose name or area has this text")
    parser.add_argument("--output", type=Path, help="write the table there, too")
    parser.add_argument("--skip-check", action="store_true", help="do not run the unmodified copy first")
    options = parser.parse_args()
    chosen = [d for d in DEFECTS if not options.only or any(word in f"{d.name} ({d.area})" for word in options.only)]
    if not chosen:
        raise SystemExit(f"no defect has {' or '.join(options.only)} in its name or area")
    # One process: the tests are few, and so is what they share the machine with.
    everything = [["-n", "0", *options.tests.split()]] if options.tests else []
    lines = ["| Defect | Area | Found by | Seconds |", "|---|---|---|---|"]
    print(*lines, sep="\n")
    with tempfile.TemporaryDirectory(prefix="defects-") as folder:
        copy = copy_of_checkout(Path(folder) / "checkout")
        check_imports(copy)
        if not options.skip_check:
            likely = sorted({test for defect in chosen for test in defect.likely})
            for tier in TIERS:
                broken = first_failure(copy, everything[0] if everything else ["-n", "0", *likely], tier)
                if broken:
                    raise SystemExit(f"the unmodified copy fails: {broken}")
        for defect in chosen:
            calls = [*(["-n", "0", test] for test in defect.likely), *everything]
            found, seconds = tried(copy, defect, calls)
            lines.append(f"| {defect.name} | {defect.area} | {found} | {seconds:.0f} |")
            print(lines[-1], flush=True)
    missed = sum("NOT FOUND" in line for line in lines)
    lines.append(f"\n{len(chosen)} defects, {missed} not found.")
    print(lines[-1])
    if options.output:
        options.output.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
