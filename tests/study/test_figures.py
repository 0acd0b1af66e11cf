"""Figures, from recorded files that no training wrote."""

import xml.etree.ElementTree as ET

import pytest

from study.config import Cell
from study.figures import draw_all, explosion, find_pair, poor_updates
from study.learning_curves import curve_of, draw_learning, error_range, first_part, loss_range
from study.report import write_report
from support.fake_study import fake_study


def check_files(paths, names):
    assert [path.name for path in paths] == [f"{name}.{kind}" for name in names for kind in ("png", "svg")]
    for path in paths:
        content = path.read_bytes()
        if path.suffix == ".png":
            assert (content[:8], content[-8:]) == (b"\x89PNG\r\n\x1a\n", b"IEND\xaeB`\x82")
        else:
            assert ET.fromstring(content).tag == "{http://www.w3.org/2000/svg}svg"
            assert b"<dc:date>" not in content


def test_all_figures_are_written(everything):
    check_files(everything[1], ["figure1", "figure2", "figure3", "figure4", "figure5"])


def test_one_method_twice_gives_the_same_bytes(tmp_path):
    results = fake_study(tmp_path, methods=("path-sgd",), inits=("balanced",), epochs=3)
    content = []
    for folder in (tmp_path / "once", tmp_path / "twice"):
        drawn = draw_all(results, folder)
        check_files(drawn, ["figure2", "figure4"])
        write_report(results, [], [], drawn, folder / "report.html")
        content.append([path.read_bytes() for path in [*drawn, folder / "report.html"]])
    assert content[0] == content[1]
    assert find_pair(results) is None


def test_the_legend_has_a_cross_only_where_one_is_drawn(tmp_path):
    results = fake_study(tmp_path, methods=("sgd",), diverged={("sgd", "unbalanced", 0): 4})
    for last, expected in ((3, False), (12, True)):
        (legend,) = draw_learning(results, "Figure 2", dropout=False, last=last).legends
        assert any("diverged" in text.get_text() for text in legend.get_texts()) is expected


def test_a_study_where_nothing_ended_well_is_drawn(tmp_path):
    results = fake_study(
        tmp_path,
        methods=("sgd",),
        inits=("unbalanced",),
        unchosen=[("sgd", "unbalanced")],
        dropouts=(0.5, 0.2),
    )
    assert draw_learning(results, "Figure 2", dropout=False, last=5) is None
    figure = draw_learning(results, "Figure 3", dropout=True, last=5)
    labels = [axes.get_ylabel() for axes in figure.axes]
    assert [label for label in labels if label] == ["digits\ndropout 0.5", "digits\ndropout 0.2"]
    assert "no step size ended well" in figure.axes[0].texts[0].get_text()


def curve(results, name, init, last=12):
    """Of the test error on the first data set, without dropout; with its runs."""
    cell = Cell(results.study.datasets[0], 0.0, init, name)
    return curve_of(results.finals[cell], "test_error", last), results.finals[cell]


def test_curves_of_repeats(everything):
    found, runs = curve(everything[0], "sgd", "unbalanced")
    # The second of two runs diverged in epoch 4: both are there up to epoch 3, one goes on to 12.
    assert len(found.mean) == len(found.low) == len(found.high) == 4
    assert found.low[3] < found.mean[3] < found.high[3]
    assert found.mean[3] == pytest.approx((runs[0].errors[3] + runs[1].errors[3]) / 2)
    assert [(start, len(values)) for start, values in found.rest] == [(3, 10)]
    assert found.ends == [(3, runs[1].errors[3])]
    assert found.last == runs[0].errors[-1]
    # Shown up to an epoch before it diverged, it has not.
    assert curve(everything[0], "sgd", "unbalanced", last=3)[0].ends == []
    assert curve_of([], "test_error", last=3).mean == []


def test_ranges_are_those_of_the_balanced_runs(everything):
    (well, _), (hurt, _) = (
        curve(everything[0], *of) for of in (("path-sgd", "balanced"), ("sgd", "unbalanced"))
    )
    shown = error_range([well], [hurt], last=12)
    assert shown.low < min(well.mean)
    assert shown.high < hurt.last
    assert shown.leaves(hurt.values(2)) == "\u2191"
    assert shown.leaves(well.values(2)) == ""
    assert shown.leaves([shown.high, shown.low - 0.01]) == "\u2193"
    assert loss_range([]).high > loss_range([]).low


def test_the_first_part_is_about_a_third():
    for epochs in range(1, 1001):
        part = first_part(epochs)
        assert min(5, epochs) <= part <= epochs
        assert abs(part - epochs / 3) <= max(4, epochs / 11) or part == epochs


def test_explosion():
    # The chain f = w2 relu(w1 x) with x = 1, df = -1, step 1. Gradients: dw1 = -w2 x, dw2 = -w1 x.
    # SGD: (1, 1) -> (2, 2) and (100, 1/100) -> (100 + 1/100, 1/100 + 100).
    # Path-SGD divides by gamma(w1) = w2^2, gamma(w2) = w1^2: w1 + 1/w2 and w2 + 1/w1, so
    # (1, 1) -> (2, 2) and (100, 1/100) -> (200, 2/100): both double, and 4 = 2 x 2 comes out.
    found = explosion()
    assert found.balanced[0].weights == [1, 1]
    assert found.balanced[1].weights == found.balanced[2].weights == [2, 2]
    assert found.unbalanced[0].weights == [100, 0.01]
    assert found.unbalanced[1].weights == pytest.approx([100.01, 100.01])
    assert found.unbalanced[2].weights == pytest.approx([200, 0.02])
    assert found.exploded
    assert found.unbalanced[1].outputs == pytest.approx((100.01**2,))
    assert found.gaps[1] == pytest.approx(100.01**2 - 4)
    assert found.gaps[2] < 1e-12
    assert "100 and 0.01 become 100.01 and 100.01 in one step of SGD" in str(found)


def test_poor_updates():
    # W1 = [[1, 1], [1, 2]], W2 = [[1, 1], [2, 1]], x = (1, 1): h = (2, 3), f = (5, 7); df = (-1, -1).
    # dW2[j, k] = -h[k] and dW1[k, i] = -sum_j W2[j, k], which is -3 for k = 0 and -2 for k = 1.
    # SGD: W1 = [[4, 4], [3, 4]], W2 = [[3, 4], [4, 4]]: h = (8, 7), f = (24 + 28, 32 + 28) = (52, 60).
    # Path-SGD divides dW1[k, i] by sum_j W2[j, k]^2 = (5, 2) and dW2[j, k] by sum_i W1[k, i]^2 = (2, 5):
    # W1 = [[1.6, 1.6], [2, 3]], W2 = [[2, 1.6], [3, 1.6]]: h = (3.2, 5), f = (14.4, 17.6).
    # Rescaled by (10, 1/10): W1 = [[10, 10], [.1, .2]], W2 = [[.1, 10], [.2, 10]], h = (20, .3).
    # SGD: W1 = [[10.3, 10.3], [20.1, 20.2]], W2 = [[20.1, 10.3], [20.2, 10.3]]: h = (20.6, 40.3),
    # f = (414.06 + 415.09, 416.12 + 415.09).
    found = poor_updates()
    assert found.balanced[0].outputs == found.unbalanced[0].outputs == pytest.approx((5, 7))
    assert found.balanced[1].weights == pytest.approx([4, 4, 3, 4, 3, 4, 4, 4])
    assert found.balanced[1].outputs == pytest.approx((52, 60))
    assert found.unbalanced[1].outputs == pytest.approx((829.15, 831.21))
    assert found.balanced[2].weights == pytest.approx([1.6, 1.6, 2, 3, 2, 1.6, 3, 1.6])
    assert found.unbalanced[2].weights == pytest.approx([16, 16, 0.2, 0.3, 0.2, 16, 0.3, 16])
    assert found.balanced[2].outputs == pytest.approx((14.4, 17.6))
    assert found.gaps[1] == pytest.approx(777.15)
    assert found.gaps[2] < 1e-12
