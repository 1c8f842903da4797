# One image for the scheduler, the workers and clients: docker build --tag dask-coded .
FROM python:3.12-slim
COPY . /src/dask-coded
RUN pip install --no-cache-dir "/src/dask-coded[complete,linear-model,storage]"
ENV DASK_DISTRIBUTED__SCHEDULER__PRELOAD='["dask_coded.preload"]'
