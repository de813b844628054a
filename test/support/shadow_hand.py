"""A Shadow hand as a USD file for Isaac Lab 3.0, from the MuJoCo model in Gymnasium-Robotics.

Names are those of Isaac Lab's tasks: joint numbers start at 1, and a motor pulls a tendon
through the last two joints of each finger. There are no meshes.

``python test/support/shadow_hand.py hand.usda`` writes the file.
"""

import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import mujoco
import numpy as np

FORWARD = np.array([-0.5, 0.5, -0.5, 0.5])  # fingers point along x and the palm up, not z and -y
FINGERS = ("FF", "MF", "RF", "LF")
HEAD = """#usda 1.0
(
    defaultPrim = "hand"
    metersPerUnit = 1
    upAxis = "Z"
)
def Xform "hand" (prepend apiSchemas = ["PhysicsArticulationRootAPI"])
{
    def PhysicsFixedJoint "base"
    {
        rel physics:body1 = </hand/rh_forearm>
    }
"""
BODY = """    def Xform "{name}" (prepend apiSchemas = ["PhysicsRigidBodyAPI", "PhysicsMassAPI"])
    {{
        float physics:mass = {mass}
        point3f physics:centerOfMass = {center}
        float3 physics:diagonalInertia = {inertia}
        quatf physics:principalAxes = {axes}
        double3 xformOp:translate = {place}
        quatd xformOp:orient = {turn}
        uniform token[] xformOpOrder = ["xformOp:translate", "xformOp:orient"]
{shapes}    }}
"""
SHAPE = """        def {kind} "{name}" (prepend apiSchemas = ["PhysicsCollisionAPI"])
        {{
            {size}
            double3 xformOp:scale = {scale}
            double3 xformOp:translate = {place}
            quatd xformOp:orient = {turn}
            uniform token[] xformOpOrder = ["xformOp:translate", "xformOp:orient", "xformOp:scale"]
        }}
"""
JOINT = """    def PhysicsRevoluteJoint "{name}" (prepend apiSchemas = ["PhysicsDriveAPI:angular"])
    {{
        rel physics:body0 = </hand/{parent}>
        rel physics:body1 = </hand/{body}>
        uniform token physics:axis = "Z"
        float physics:lowerLimit = {limits[0]}
        float physics:upperLimit = {limits[1]}
        point3f physics:localPos0 = {place}
        quatf physics:localRot0 = {turn}
        quatf physics:localRot1 = {axis}
        float drive:angular:physics:stiffness = 0
        float drive:angular:physics:damping = {damping}
    }}
"""
TENDON = """    def MjcTendon "rh_{finger}J0"
    {{
        uniform token mjc:type = "fixed"
        rel mjc:path = [</hand/rh_{finger}J2>, </hand/rh_{finger}J1>]
        uniform double[] mjc:path:coef = [1, 1]
    }}
    def MjcActuator "rh_A_{finger}J0"
    {{
        rel mjc:target = </hand/rh_{finger}J0>
        uniform token mjc:ctrlLimited = "true"
        uniform double mjc:ctrlRange:max = 3.1415
        uniform double[] mjc:gainPrm = [0.5, 0, 0, 0, 0, 0, 0, 0, 0, 0]
        uniform token mjc:biasType = "affine"
        uniform double[] mjc:biasPrm = [0, -0.5, 0, 0, 0, 0, 0, 0, 0, 0]
    }}
"""


def write(file: Path) -> Path:
    folder = Path(next(iter(find_spec("gymnasium_robotics").submodule_search_locations)))
    model = mujoco.MjModel.from_xml_path(str(folder / "envs" / "assets" / "hand" / "reach.xml"))
    tendons = [TENDON.format(finger=finger) for finger in FINGERS]
    file.write_text("".join([HEAD, *bodies(model), *tendons, "}\n"]))
    return file


def bodies(model) -> Iterator[str]:
    """The bodies, each in the frame of the forearm, and the joints that move them."""
    poses = {"rh_forearm": (np.zeros(3), np.array([1.0, 0.0, 0.0, 0.0]))}
    for body in map(model.body, range(model.nbody)):
        parent = renamed(model.body(body.parentid[0]).name)
        if parent in poses:
            pose = body.pos, body.quat
            if parent == "rh_forearm":
                pose = moved((np.zeros(3), FORWARD), pose)
            poses[renamed(body.name)] = moved(poses[parent], pose)
            yield hinge(model.joint(body.jntadr[0]), renamed(body.name), parent, *pose)
        if renamed(body.name) in poses:
            yield rigid(model, body, *poses[renamed(body.name)])


def renamed(name: str) -> str:
    """Renames, for example, ``robot0:FFJ0`` to ``rh_FFJ1``."""
    name = name.replace("robot0:", "rh_")
    return re.sub(r"(?<=J)\d$", lambda digit: str(int(digit[0]) + 1), name)


def moved(outer, inner):
    """A pose in the frame ``outer``, transformed to the parent frame."""
    place = np.zeros(3)
    mujoco.mju_rotVecQuat(place, inner[0], outer[1])
    return outer[0] + place, turned(outer[1], inner[1])


def turned(outer, inner):
    turn = np.zeros(4)
    mujoco.mju_mulQuat(turn, outer, inner)
    return turn


def hinge(joint, body: str, parent: str, place, turn) -> str:
    axis = np.zeros(4)
    mujoco.mju_quatZ2Vec(axis, joint.axis)
    return JOINT.format(
        name=renamed(joint.name),
        parent=parent,
        body=body,
        limits=np.degrees(joint.range),
        place=row(place),
        turn=row(turned(turn, axis)),
        axis=row(axis),
        damping=np.radians(joint.damping[0]),
    )


def rigid(model, body, place, turn) -> str:
    geoms = map(model.geom, range(model.ngeom))
    shapes = [shape(x) for x in geoms if x.bodyid[0] == body.id and x.name.startswith("robot0:C_")]
    return BODY.format(
        name=renamed(body.name),
        mass=body.mass[0],
        center=row(body.ipos),
        inertia=row(body.inertia),
        axes=row(body.iquat),
        place=row(place),
        turn=row(turn),
        shapes="".join(shapes),
    )


def shape(geom) -> str:
    radius, half, _ = geom.size
    if geom.type[0] == mujoco.mjtGeom.mjGEOM_CAPSULE:
        kind, scale = "Capsule", np.ones(3)
        size = f'double radius = {radius}; double height = {2 * half}; uniform token axis = "Z"'
    elif geom.type[0] == mujoco.mjtGeom.mjGEOM_BOX:
        kind, scale, size = "Cube", geom.size, "double size = 2"
    else:
        return ""
    rows = {"scale": row(scale), "place": row(geom.pos), "turn": row(geom.quat)}
    return SHAPE.format(kind=kind, name=renamed(geom.name), size=size, **rows)


def row(values) -> str:
    return "(" + ", ".join(f"{x:.9g}" for x in values) + ")"


if __name__ == "__main__":
    write(Path(sys.argv[1]))
