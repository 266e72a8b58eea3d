"""The notebooks run from top to bottom on a CPU, and what is committed is what they print."""

import copy
import gc
import json
import os
import re
import warnings
from pathlib import Path

import nbformat
import numpy as np
import pytest
from ipykernel.kernelspec import write_kernel_spec
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpecManager
from nbclient import NotebookClient

from analyses import store
from analyses.result import Dataset, Result, Variable

ROOT = Path(__file__).parents[2]
NOTEBOOKS = ROOT / "notebooks"
STORED = NOTEBOOKS / "results" / "receptive_field_grid.h5"
PROBING = NOTEBOOKS / "results" / "layerwise_probing_shipped.h5"
NAMES = sorted(path.name for path in NOTEBOOKS.glob("*.ipynb"))
ABSOLUTE_PATH = re.compile(r"(?<![\w./:<>-])(?:/[\w.@+-]+){2,}|\b[A-Za-z]:\\\w")


@pytest.fixture(scope="module")
def execute(tmp_path_factory):
    """(name, expression) -> the executed copy, and the value of the expression in its kernel, through JSON."""
    specs = tmp_path_factory.mktemp("kernels")
    write_kernel_spec(specs / "python3")  # this interpreter, whatever kernels the machine has registered

    def run(name, expression, **environment):
        notebook = copy.deepcopy(committed(name))
        ask = f"import json as _json\nprint('ANSWER', _json.dumps({expression}))"
        notebook.cells.append(nbformat.v4.new_code_cell(ask))
        manager = AsyncKernelManager(
            kernel_name="python3", kernel_spec_manager=KernelSpecManager(kernel_dirs=[str(specs)])
        )
        client = NotebookClient(
            notebook, km=manager, coalesce_streams=True, resources={"metadata": {"path": str(NOTEBOOKS)}}
        )
        search = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        try:
            client.execute(env={**os.environ, "PYTHONPATH": search, "OMP_NUM_THREADS": "1", **environment})
        finally:
            # jupyter_client leaves sockets to the garbage collector, which warns: here, and not in some later test
            # that takes warnings for errors
            del client, manager
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ResourceWarning)
                gc.collect()
        answer = next(line for line in printed(notebook.cells.pop()).splitlines() if line.startswith("ANSWER "))
        return notebook, json.loads(answer.removeprefix("ANSWER "))

    return run


def committed(name):
    return nbformat.read(NOTEBOOKS / name, as_version=4)


def printed(cell):
    return "".join(output.text for output in cell.outputs if output.output_type == "stream")


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def texts(cell):
    """Whatever a reader sees of a cell, images apart."""
    yield cell.source
    for output in cell.get("outputs", ()):
        yield output.get("text", "")
        for kind, data in output.get("data", {}).items():
            if not kind.startswith("image/"):
                yield data


def figures(notebook):
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    return [output.data["image/png"] for output in outputs if "image/png" in output.get("data", {})]


def test_tour_breaks_the_answer_and_gives_the_model_back(execute):
    notebook, found = execute(
        "00_tour.ipynb",
        "{'value': sample.value, 'answers': answers, 'looking': looking, 'identical': identical and not left_over,"
        " 'mass': mass.max().max(), 'layer': model.layers[best_layer].kind, 'distance': distance}",
    )
    answers = found["answers"]
    assert re.fullmatch(r"\d{7}", found["value"])
    assert answers["unrestricted"] == answers["efficient -> 64"] == found["value"]
    assert answers["full -> 64"] != found["value"]
    assert found["distance"] > 64
    assert found["mass"] > 0.5
    assert found["looking"]
    assert found["layer"] == "full"
    assert found["identical"]
    assert len(figures(notebook)) == 2


def test_receptive_field_reads_the_stored_file(execute):
    name = "01_receptive_field.ipynb"
    notebook, found = execute(name, "{'names': names, 'W': W, 'verdicts': verdicts.to_dict()}")
    stored = store.read(STORED)
    assert found["names"] == [group for group in stored.groups if group and "/" not in group]
    assert set(found["verdicts"]) == set(found["names"])
    assert {verdict for column in found["verdicts"].values() for verdict in column.values()} <= {"yes", "no", "-"}
    for checkpoint, column in found["verdicts"].items():  # the summary's own interval decides the first statement
        summary = stored.groups[checkpoint]
        row = list(summary["condition"]).index(f"full -> {found['W']}")
        harmed = summary["log_long_ppl_harm_interval"][row, 0] > 0
        assert column[f"full -> {found['W']} harms key tokens"] == ("yes" if harmed else "no")
    assert len(figures(notebook)) >= 5
    conclusions = [printed(code_cells(version)[-1]) for version in (notebook, committed(name))]
    assert conclusions[0] == conclusions[1], f"{name} is older than {STORED.name}: run it again and commit it"


def test_receptive_field_reads_a_smaller_study(execute, tmp_path):
    """One checkpoint, two windows, no sinks, layers, reach or floor: what a CPU run without --grid writes."""
    small = tmp_path / "small.h5"
    name = store.read(STORED).attributes["checkpoint_name"][-1]
    store.write(small, without_grid(store.read(STORED), name))
    _, found = execute(
        "01_receptive_field.ipynb", "{'names': names, 'windows': RUN, 'W': W}", RECEPTIVE_FIELD_H5=str(small)
    )
    assert found["names"] == [name]
    assert len(found["windows"]) == 2
    assert found["W"] in found["windows"]


def without_grid(result, name):
    """The result reduced to one checkpoint and the conditions of its two widest windows."""
    summary = result.groups[name]
    windows = sorted(set(summary["restricted_window"][summary["restricted_group"] == "full"]))[-2:]
    grouped = np.isin(summary["restricted_group"], ["full", "efficient"]) & (summary["restricted_sinks"] == 0)
    kept = (summary["restricted_group"] == "none") | (grouped & np.isin(summary["restricted_window"], windows))
    groups = {
        path: Dataset(reduced(group.variables, kept), reduced(group.coords, kept), group.description)
        for path, group in result.groups.items()
        if path.split("/")[0] == name
    }
    return Result(groups, result.attributes)


def reduced(variables, kept):
    return {
        name: Variable(v.dims, v.values.compress(kept, v.dims.index("condition")), v.units, v.description)
        if "condition" in v.dims
        else v
        for name, v in variables.items()
    }


def test_layerwise_probing_reads_the_stored_file(execute):
    name = "02_layerwise_probing.ipynb"
    notebook, found = execute(
        name,
        "{'names': names, 'verdicts': verdicts.to_dict(), 'nothing': nothing['all at chance'].astype(bool).to_dict(),"
        " 'own': table.shape[0]}",
    )
    stored = store.read(PROBING)
    assert found["names"] == [group for group in stored.groups if "/" not in group]
    assert all(found["nothing"].values()), "a control that must find nothing found something"
    assert found["own"] == 4
    for column, verdicts in found["verdicts"].items():  # the stored interval decides
        group = stored.groups[column.replace(", ", "/")]
        assert verdicts["share significant (p < 0.05)"] == ("yes" if group["share_p"][0, 0] < 0.05 else "no")
        above = group["share_over_random_interval"][0, 0] > 0
        assert verdicts["share in full layers above the twin's"] == ("yes" if above else "no")
    assert len(figures(notebook)) == 2
    conclusions = [printed(code_cells(version)[-2]) for version in (notebook, committed(name))]
    assert conclusions[0] == conclusions[1], f"{name} is older than {PROBING.name}: run it again and commit it"


def test_layerwise_probing_reads_a_study_without_controls(execute, tmp_path):
    """Trained weights alone, one haystack, one checkpoint."""
    stored = store.read(PROBING)
    name = stored.attributes["checkpoint_name"][0]
    group = stored.groups[f"{name}/repeat"]
    first = {key: of_first_control(v) for key, v in group.variables.items() if "over_random" not in key}
    coords = {key: of_first_control(coord) for key, coord in group.coords.items()}
    config = json.dumps({**json.loads(stored.attributes["config"]), "haystacks": ["repeat"]})
    groups = {name: stored.groups[name], f"{name}/repeat": Dataset(first, coords, group.description)}
    store.write(tmp_path / "small.h5", Result(groups, {**stored.attributes, "config": config}))
    _, found = execute(
        "02_layerwise_probing.ipynb", "verdicts.to_dict()", LAYERWISE_PROBING_H5=str(tmp_path / "small.h5")
    )
    assert list(found) == [f"{name}, repeat"]
    assert found[f"{name}, repeat"]["more than in the untrained twin"] == "-"
    assert found[f"{name}, repeat"]["readable after the last layer"] == "yes"


def of_first_control(variable):
    if "control" not in variable.dims:
        return variable
    values = variable.values.take([0], variable.dims.index("control"))
    return Variable(variable.dims, values, variable.units, variable.description)


def test_these_notebooks_are_there():
    assert {"00_tour.ipynb", "01_receptive_field.ipynb", "02_layerwise_probing.ipynb", "07_scaling_law.ipynb"} <= set(
        NAMES
    )


@pytest.mark.parametrize("name", NAMES)
def test_committed_notebook_is_executed_small_and_portable(name):
    path = NOTEBOOKS / name
    notebook = committed(name)
    nbformat.validate(notebook)
    assert path.read_text(encoding="utf-8") == nbformat.writes(notebook) + "\n"
    assert path.stat().st_size < 1_000_000
    assert notebook.metadata.kernelspec.name == "python3"
    counts = [cell.execution_count for cell in code_cells(notebook)]
    assert counts == list(range(1, len(counts) + 1)), f"{name} was not run from top to bottom"
    assert figures(notebook)
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]


@pytest.mark.parametrize("name", NAMES)
def test_committed_notebook_names_no_machine(name):
    for cell in committed(name).cells:
        for text in texts(cell):
            assert not ABSOLUTE_PATH.search(text), f"{name}: {ABSOLUTE_PATH.search(text).group()!r} in {text[:80]!r}"


@pytest.mark.parametrize(
    ("text", "machine"),
    [
        ("/home/ann/lib/x.py:21: Warning", True),
        ("file '/tmp/a'", True),
        (r"C:\Users\ann", True),
        ("notebooks/results/x.h5", False),
        ("‖o − o_w‖ / ‖o‖", False),
        ("</td></tr>", False),
    ],
)
def test_absolute_paths_are_recognised(text, machine):
    assert bool(ABSOLUTE_PATH.search(text)) is machine


def test_scaling_law_reads_the_stored_file(execute):
    name = "07_scaling_law.ipynb"
    notebook, found = execute(
        name, "{'name': name, 'fits': group.fit.values.tolist(), 'alpha': free.parameters.values.tolist()[2]}"
    )
    stored = store.read(NOTEBOOKS / "results" / "scaling_law.h5").groups[found["name"]]
    assert found["fits"] == list(stored["fit"])
    assert found["alpha"] == stored["parameters"][0, 2]
    assert figures(notebook)
    conclusions = [printed(code_cells(version)[-1]) for version in (notebook, committed(name))]
    assert conclusions[0] == conclusions[1], f"{name} is older than scaling_law.h5: run it again and commit it"


def test_scaling_law_reads_a_smaller_study(execute, tmp_path):
    """Two sizes, no released fits: nothing is held out."""
    from analyses import scaling_law

    rows = [f"{n},{n * r},{90 * n**-0.24 + 3500 * (n * r) ** -0.36}" for n in (1.5e7, 6.5e7) for r in (60, 130, 300)]
    (tmp_path / "t.csv").write_text("n,d,loss\n" + "\n".join(rows))
    scaling_law.scaling_law(scaling_law.Config((tmp_path / "t.csv",), out=tmp_path / "t.h5", resamples=5))
    _, found = execute("07_scaling_law.ipynb", "group.fit.values.tolist()", SCALING_LAW_H5=str(tmp_path / "t.h5"))
    assert found == ["no constant, all points", "with constant, all points"]


def test_gradient_influence_reads_the_stored_files(execute):
    name = "03_gradient_influence.ipynb"
    notebook, found = execute(name, "{'names': names, 'W': int(W), 'verdicts': verdicts.to_dict()}")
    stored = [store.read(path) for path in sorted((NOTEBOOKS / "results").glob("gradient_influence_*.h5"))]
    summaries = [(group, result) for result in stored for group in result.groups if group and "/" not in group]
    twice = [group for group, _ in summaries]
    labels = [g if twice.count(g) == 1 else f"{g}, {r.attributes['score']}" for g, r in summaries]
    assert found["names"] == labels
    for label, (group, result) in zip(labels, summaries, strict=True):  # the summary's own interval decides
        summary, column = result.groups[group], found["verdicts"][label]
        row = list(summary["window"]).index(found["W"])
        harmed = summary["truncation_loss_change_interval"][row, 0] > 0
        assert column[f"the last {found['W']} tokens alone cost loss"] == ("yes" if harmed else "no")
        low, high = summary["slope_beyond_interval"][list(summary["window"]).index(2048)]
        falls, flat = "it still falls beyond 2048: slope below 0", "it is flat beyond 2048: slope within ± 0.25"
        assert column[falls] == ("yes" if high < 0 else "no")
        assert column[flat] == ("yes" if low > -0.25 and high < 0.25 else "no")
    assert len(figures(notebook)) >= 2
    conclusions = [printed(code_cells(version)[-1]) for version in (notebook, committed(name))]
    assert conclusions[0] == conclusions[1], f"{name} is older than its result: run it again and commit it"


def test_gradient_influence_reads_a_smaller_study(execute, tmp_path):
    """One checkpoint, no layers, no groups: what a run without options writes."""
    stored = store.read(NOTEBOOKS / "results" / "gradient_influence_shipped.h5")
    name = stored.attributes["checkpoint_name"][-1]
    groups = {path: group for path, group in stored.groups.items() if path in (name, f"{name}/texts")}
    store.write(tmp_path / "small.h5", Result(groups, stored.attributes))
    notebook = "03_gradient_influence.ipynb"
    _, found = execute(notebook, "{'names': names}", GRADIENT_INFLUENCE_H5=str(tmp_path / "small.h5"))
    assert found["names"] == [name]


TRACING = NOTEBOOKS / "results" / "retrieval_tracing_runs.h5"


def test_retrieval_tracing_reads_the_stored_file(execute):
    name = "04_retrieval_tracing.ipynb"
    notebook, found = execute(
        name,
        "{'names': names, 'verdicts': verdicts.to_dict(), 'mark': ACCURACY, 'drawn': {name: np.percentile("
        "crossing_draws(name, 'accuracy', ACCURACY), [2.5, 97.5], method='closest_observation').tolist()"
        " for name in traceable}}",
    )
    stored = store.read(TRACING)
    assert found["names"] == [group for group in stored.groups if group and "/" not in group]
    for run, column in found["verdicts"].items():  # the stored intervals decide
        high = stored.groups[f"{run}/ablation"]["top_accuracy_change_interval"][0, 1]
        assert column["ablating the first head costs accuracy"] == (
            "-" if np.isnan(high) else "no" if high >= 0 else "yes"
        )
    for run, interval in found["drawn"].items():  # what it resamples from single prompts is what the summary holds
        group = stored.groups[run]
        (row,) = np.flatnonzero((group["crossing_series"] == "accuracy") & (group["crossing_mark"] == found["mark"]))
        np.testing.assert_allclose(interval, group["crossing_interval"][row], rtol=1e-6)
    assert len(figures(notebook)) >= 5
    conclusions = [printed(code_cells(version)[-1]) for version in (notebook, committed(name))]
    assert conclusions[0] == conclusions[1], f"{name} is older than {TRACING.name}: run it again and commit it"


def test_retrieval_tracing_reads_a_smaller_study(execute, tmp_path):
    """One checkpoint of one run, without ablations: nothing crosses, nothing is ablated."""
    stored = store.read(TRACING)
    run = next(iter(stored.groups))
    groups = {
        path: Dataset(last_checkpoint(group.variables), last_checkpoint(group.coords), group.description)
        for path, group in stored.groups.items()
        if path in (run, f"{run}/heads", f"{run}/prompts")
    }
    store.write(tmp_path / "small.h5", Result(groups, stored.attributes))
    _, found = execute(
        "04_retrieval_tracing.ipynb", "verdicts.to_dict()", RETRIEVAL_TRACING_H5=str(tmp_path / "small.h5")
    )
    assert list(found) == [run]
    assert [text for text in found[run] if "crosses" in text and found[run][text] == "-"]
    assert not [text for text in found[run] if text.startswith("ablating")]


def last_checkpoint(variables):
    return {
        name: Variable(v.dims, v.values.take([-1], v.dims.index("checkpoint")), v.units, v.description)
        if "checkpoint" in v.dims
        else v
        for name, v in variables.items()
    }


CAUSAL = sorted((NOTEBOOKS / "results").glob("causal_tracing_*.h5"))


def test_causal_tracing_reads_the_stored_files(execute):
    name = "06_causal_tracing.ipynb"
    notebook, found = execute(
        name, "{'names': names, 'verdicts': verdicts.to_dict(), 'movers': movers, 'shown': shown, 'gain': list(gain)}"
    )
    stored = [store.read(path) for path in CAUSAL]
    first = stored[0]
    assert found["names"][0] == next(iter(first.groups))
    for label, column in found["verdicts"].items():  # the stored intervals decide
        if label not in first.groups:
            continue
        knocked, patched = first.groups[f"{label}/knockout"], first.groups[f"{label}/patching"]
        high = knocked["log_p_change_interval"][list(knocked["knockout"]).index("full, answer"), 0, 1]
        said = column["hiding the value from full attention costs log p"]
        assert said == ("-" if np.isnan(high) else "yes" if high < 0 else "no")
        mixer = patched["recovered"][0, :, list(patched["component"]).index("attn_out"), -1]
        assert found["movers"][label] == np.flatnonzero(np.nan_to_num(mixer) >= 0.05).tolist()
        assert column["an untrained pair separates"] == ("yes" if first[f"{label}/n_separated_untrained"] else "no")
    assert found["shown"]
    assert len(figures(notebook)) == 3
    conclusions = [printed(code_cells(version)[-1]) for version in (notebook, committed(name))]
    assert conclusions[0] == conclusions[1], f"{name} is older than its result: run it again and commit it"


def test_causal_tracing_reads_a_smaller_study(execute, tmp_path):
    """One checkpoint, no probes, no states, no pair that separates."""
    stored = store.read(CAUSAL[0])
    name = next(iter(stored.groups))
    groups = {path: group for path, group in stored.groups.items() if path in (name, f"{name}/knockout")}
    summary = {**groups[name].variables, "n_separated": Variable((), 0, "1", "none")}
    groups[name] = Dataset(summary, groups[name].coords, "")
    patched = stored.groups[f"{name}/patching"]
    variables = {
        key: Variable(v.dims, np.full_like(v.values, np.nan), v.units, v.description) if "recovered" in key else v
        for key, v in patched.variables.items()
    }
    groups[f"{name}/patching"] = Dataset(variables, patched.coords, "")
    store.write(tmp_path / "small.h5", Result(groups, stored.attributes))
    _, found = execute("06_causal_tracing.ipynb", "verdicts.to_dict()", CAUSAL_TRACING_H5=str(tmp_path / "small.h5"))
    assert list(found) == [name]
    assert found[name]["one mixer at the last token recovers more than 90 %"] == "-"
    assert found[name]["the class can be read from a state at the last token"] == "-"


OWN = "gemma3_270m_"


def test_your_own_hybrid_reads_the_stored_files(execute):
    name = "05_your_own_hybrid.ipynb"
    notebook, found = execute(
        name, "{'name': NAME, 'W': int(W), 'full': FULL, 'verdicts': verdicts.to_dict(), 'leading': leading}"
    )
    results = NOTEBOOKS / "results"
    assert found["full"] == [5, 11, 17]
    for length, column in found["verdicts"].items():  # the stored intervals decide
        summary = store.read(results / f"{OWN}receptive_field_{length}.h5").groups[found["name"]]
        for who, label in (("full 5,11,17", "full"), *((str(layer), f"layer {layer}") for layer in found["full"])):
            row = list(summary["condition"]).index(f"{label} -> {found['W']}")
            low, high = summary["log_long_ppl_harm_interval"][row, 0], summary["niah_change_interval"][row, 1]
            harms, loses = (column[f"{who} -> {found['W']} {what}"] for what in ("harms key tokens", "loses needles"))
            assert harms == ("n/a" if np.isnan(low) else "yes" if low > 0 else "not shown")
            assert loses == ("n/a" if np.isnan(high) else "yes" if high < 0 else "not shown")
    probed = store.read(results / f"{OWN}layerwise_probing.h5")
    for path, group in probed.groups.items():
        if "/" in path and not path.endswith("/null"):
            gain = group["gain"][0, 0]
            assert found["leading"][f"probe's gain, {path.split('/')[1]}"] == int(np.nanargmax(gain))
    assert len(figures(notebook)) >= 5
    conclusions = [printed(code_cells(version)[-1]) for version in (notebook, committed(name))]
    assert conclusions[0] == conclusions[1], f"{name} is older than its results: run it again and commit it"


def test_your_own_hybrid_reads_a_smaller_study(execute, tmp_path):
    """One length, no layers or groups of the gradient, no untrained twin, no ablations."""
    results = NOTEBOOKS / "results"
    (tmp_path / f"{OWN}selfcheck.txt").write_bytes((results / f"{OWN}selfcheck.txt").read_bytes())
    shortest = results / f"{OWN}receptive_field_1k.h5"
    traced = min(results.glob(f"{OWN}retrieval_tracing_*.h5"))
    (tmp_path / shortest.name).write_bytes(shortest.read_bytes())
    for path, dropped in ((traced, ("ablation",)), (results / f"{OWN}gradient_influence.h5", ("layers", "groups"))):
        stored = store.read(path)
        kept = {group: data for group, data in stored.groups.items() if group.split("/")[-1] not in dropped}
        store.write(tmp_path / path.name, Result(kept, stored.attributes))
    stored = store.read(results / f"{OWN}layerwise_probing.h5")
    groups = {}
    for path, group in stored.groups.items():
        first = {key: of_first_control(v) for key, v in group.variables.items() if "over_random" not in key}
        coords = {key: of_first_control(coord) for key, coord in group.coords.items()}
        groups[path] = Dataset(first, coords, group.description)
    store.write(tmp_path / f"{OWN}layerwise_probing.h5", Result(groups, stored.attributes))
    _, found = execute(
        "05_your_own_hybrid.ipynb",
        "{'lengths': list(restriction), 'leading': list(leading)}",
        OWN_HYBRID_RESULTS=str(tmp_path),
    )
    assert found["lengths"] == ["1k"]
    assert not [text for text in found["leading"] if "gradient" in text or "ablated" in text]
