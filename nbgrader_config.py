"""nbgrader for this course, from the repository's folder: `nbgrader generate_assignment ex04_ddp`, `nbgrader autograde …`.

solutions/ is its source. All else, the gradebook too, is under runs/grading/, or where COURSE_GRADING says.
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parent.resolve()
GRADING = Path(os.environ.get("COURSE_GRADING", ROOT / "runs" / "grading")).resolve()
GRADING.mkdir(parents=True, exist_ok=True)
# nbgrader starts alembic by its name, and without it leaves half a gradebook.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])

c = get_config()  # noqa: F821
c.NotebookClient.kernel_manager_class = "course_lib.kernel.FileKernel"

c.CourseDirectory.root = str(ROOT)
c.CourseDirectory.course_id = os.environ.get("COURSE_ID", "ddl")
c.CourseDirectory.source_directory = "solutions"
for step in ("release", "submitted", "autograded", "feedback", "solution"):
    c.CourseDirectory[f"{step}_directory"] = os.path.relpath(GRADING / step, ROOT)
c.CourseDirectory.db_url = f"sqlite:///{GRADING / 'gradebook.db'}"
if "COURSE_EXCHANGE" in os.environ:  # on a hub: a folder that all may write to, see nbgrader's documentation
    c.Exchange.root = os.environ["COURSE_EXCHANGE"]
    c.Exchange.assignment_dir = str(ROOT / "exercises")  # where learners have them already

# A learner's cells only define functions. What these do is tried by the checks, each of which has an end of its own.
c.Execute.timeout_func = lambda cell: 10 if cell.metadata.get("nbgrader", {}).get("solution", True) else 180
c.Execute.error_on_timeout = {
    "ename": "StillRunning",
    "evalue": "stopped",
    "traceback": ["StillRunning: this cell had to be stopped. A loop without an end, outside of a function?"],
}
