"""What a verl configuration says about BRACE, and which verl it may be."""

import pytest

from brace_rl.errors import ConfigError
from brace_rl.integrations.verl.options import options_from_algorithm
from brace_rl.integrations.verl.versions import UnsupportedVersionError, route_for


def test_without_a_node_the_papers_defaults_hold():
    options = options_from_algorithm({"gamma": 1.0, "lam": 1.0, "adv_estimator": "gae"})
    assert (options.value_target, options.window, options.rho_clip, options.c_clip) == ("brace", 100, 1.2, 1.1)


def test_gamma_and_lambda_are_verls_and_whitening_is_left_to_it():
    options = options_from_algorithm({"gamma": 0.99, "lam": 0.9, "brace": {"window": 7}})
    assert (options.gamma, options.lam, options.window, options.whiten) == (0.99, 0.9, 7, False)


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"lam": 0.9}, "algorithm.brace.lam: not an option here; set algorithm.lam"),
        ({"whiten": True}, "algorithm.brace.whiten: not an option here; verl whitens advantages itself"),
        ({"windw": 3}, "algorithm.brace.windw: no such option; there are value_target, window"),
        ({"window": -3}, "algorithm.brace.window = -3: must be a whole number"),
        ({"rho_clip": 0.0}, "algorithm.brace.rho_clip = 0.0"),
    ],
)
def test_an_option_that_cannot_be_meant_is_named(node, message):
    with pytest.raises(ConfigError, match=message):
        options_from_algorithm({"brace": node})


@pytest.mark.parametrize(
    ("version", "route"),
    [("0.9.0", "trainers"), ("0.9.1", "trainers"), ("0.9.2.dev0", "trainers"), ("0.8.0", "patch"), ("0.7.1", "patch")],
)
def test_the_version_decides_the_route(version, route):
    assert route_for(version) == route


@pytest.mark.parametrize("version", ["0.10.0", "1.0", "0.6.1", "unknown"])
def test_any_other_version_is_refused_with_the_supported_ones(version):
    with pytest.raises(UnsupportedVersionError, match=f"verl {version}: brace-rl supports 0.9.x .* and 0.7 to 0.8"):
        route_for(version)
