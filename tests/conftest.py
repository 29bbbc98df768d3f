def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="also the tests that are too slow for every run")
