# A trainer: `sh trainer.sh FOLDER`. It goes on from its newest finished checkpoint, and its last step is 2.
set -e
mkdir -p "$1"
cd "$1"
step=0
for done in checkpoint-*/DONE; do
    number=${done#checkpoint-}
    number=${number%/DONE}
    if [ -e "$done" ] && [ "$number" -gt "$step" ]; then step=$number; fi
done
while [ "$step" -lt 2 ]; do
    step=$((step + 1))
    mkdir -p "checkpoint-$step"
    echo "weights of $step" > "checkpoint-$step/model"
    : > "checkpoint-$step/DONE"
done
